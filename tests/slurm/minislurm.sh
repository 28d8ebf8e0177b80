#!/bin/bash
# A real Slurm cluster of a few "nodes" on one machine, for the tests.
#
#   minislurm.sh install          apt-get the packages that are missing
#   minislurm.sh start [N]        slurmctld and N slurmd (default 2); does nothing but check when it runs already
#   minislurm.sh stop             end everything that start began
#   minislurm.sh status           nodes and jobs
#   minislurm.sh fail NODE [now]  power cut: SIGKILL to every process of the node. slurmctld notices after 20 to 30 s and
#                                 requeues the node's jobs; "now" also marks the node DOWN, so that it happens at once
#   minislurm.sh recover NODE     boot the node again, after it was seen DOWN: one that is back before that is not
#                                 noticed, and its multi-node jobs hang, as on any cluster
#
# Needs root; no systemd, cgroups or accounting. Known to work: Debian 12, Slurm 22.05.8.
# Commands of Slurm find the cluster by SLURM_CONF=/run/minislurm/slurm.conf. A machine has one such cluster at a time.
#
# MINISLURM_MODE, by default netns where the kernel lets us, else plain:
#   netns  each node has its own network, hostname, processes and /dev/shm; the file system is shared, like NFS
#   plain  slurmd on several ports of 127.0.0.1; all nodes show the machine's hostname
set -euo pipefail

DIR=/run/minislurm  # a path that no other user can write to: munge's socket asks for it
CPUS=64 GPUS=4  # what each node pretends to have
NET=10.213.7 BRIDGE=msl0
export SLURM_CONF=$DIR/slurm.conf

die() { echo "minislurm: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "needs root"

install_packages() {
    local want=()
    command -v slurmctld >/dev/null || want+=(slurmctld)
    command -v slurmd >/dev/null || want+=(slurmd)
    command -v sbatch >/dev/null || want+=(slurm-client)
    command -v munged >/dev/null || want+=(munge)
    command -v ip >/dev/null || want+=(iproute2)
    command -v unshare >/dev/null || want+=(util-linux)
    [ ${#want[@]} -gt 0 ] || return 0
    echo "minislurm: apt-get install ${want[*]}"
    export DEBIAN_FRONTEND=noninteractive
    # Where there is an init system, the packages must not start daemons of their own: policy-rc.d says so.
    local policy=/usr/sbin/policy-rc.d made= status=0
    [ -e $policy ] || { made=1; printf '#!/bin/sh\nexit 101\n' >$policy; chmod +x $policy; }
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${want[@]}"; } >/dev/null || status=$?
    [ -z "$made" ] || rm -f $policy
    [ $status = 0 ] || die "apt-get could not install ${want[*]}"
}

# --- processes, by pid file and name: guards against a pid that was given to another program ---

gone() { [ ! -d "/proc/$1" ] || grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }  # ended, or a zombie

alive() {  # alive PIDFILE COMM
    local pid
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] && ! gone "$pid"
}

stop_pid() {  # stop_pid PIDFILE COMM [SIGNAL]: end it, with SIGKILL after 5 s
    if alive "$1" "$2"; then
        local pid; pid=$(cat "$1")
        kill -"${3:-TERM}" "$pid" 2>/dev/null || true
        for _ in $(seq 50); do ! gone "$pid" || break; sleep 0.1; done
        gone "$pid" || kill -KILL "$pid" 2>/dev/null || true
    fi
    rm -f "$1"
}

# --- configuration ---

pick_mode() {
    if [ -n "${MINISLURM_MODE:-}" ]; then echo "$MINISLURM_MODE"; return; fi
    if ip netns add msl-probe 2>/dev/null && ip link add msl-p0 type veth peer name msl-p1 2>/dev/null \
        && ip link add msl-pb type bridge 2>/dev/null \
        && ip netns exec msl-probe unshare --uts --ipc --pid --fork --mount --mount-proc true 2>/dev/null
    then echo netns; else echo plain; fi
    { ip link del msl-p0; ip link del msl-pb; ip netns del msl-probe; } 2>/dev/null || true
}

netns() { [ "$(cat $DIR/mode)" = netns ]; }

address() { if netns; then echo "$NET.$1"; else echo 127.0.0.1; fi; }

write_conf() {  # write_conf N
    cat <<END
ClusterName=mini
SlurmctldHost=$(hostname -s)($(address 254))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again (120 s otherwise).
AuthInfo=socket=$DIR/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
BatchStartTimeout=10
# Seconds that a cancelled run has to finish its step and save it, also on a busy disk.
KillWait=30
UnkillableStepTimeout=30
MinJobAge=3600
MessageTimeout=10
TCPTimeout=2
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
TmpFS=$DIR/tmp/%n
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd-%n.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd-%n.log
SlurmctldPort=6817
GresTypes=gpu
END
    local k where
    for k in $(seq "$1"); do
        if netns; then where="Port=6818"; else where="NodeHostname=localhost Port=$((17000 + k))"; fi
        echo "NodeName=n$k NodeAddr=$(address "$k") $where CPUS=$CPUS RealMemory=512000 Gres=gpu:$GPUS State=UNKNOWN"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
}

write_devices() {  # write_devices N: GPUs that are copies of /dev/null; slurmd wants a file for each
    # slurmd loads a cgroup plugin even though nothing here uses it; finding one by itself fails without systemd.
    echo "CgroupPlugin=cgroup/v1" >$DIR/cgroup.conf
    local k file=$DIR/gpu
    for k in $(seq 0 $((GPUS - 1))); do mknod "$DIR/gpu$k" c 1 3 2>/dev/null || file=/dev/tty; done
    echo "NodeName=n[1-$1] Name=gpu File=$file[0-$((GPUS - 1))]" >$DIR/gres.conf
}

write_hosts() {  # write_hosts [N]: names of N nodes in /etc/hosts, or none; in place, for it is often a bind mount
    local k text
    text=$(grep -v '# minislurm$' /etc/hosts || true; for k in $(seq "${1:-0}"); do echo "$(address "$k") n$k # minislurm"; done)
    echo "$text" >/etc/hosts
}

# --- nodes ---

nodes() { sed -n 's/^NodeName=\(n[0-9]*\) .*/\1/p' $SLURM_CONF 2>/dev/null || true; }

start_node() {
    local node=$1 k=${1#n}
    mkdir -p "$DIR/spool/$node" "$DIR/tmp/$node"
    if ! netns; then
        alive "$DIR/slurmd-$node.pid" slurmd || slurmd -N "$node"
        return
    fi
    ! alive "$DIR/node-$node.pid" unshare || return 0
    if [ ! -e "/run/netns/msl-$node" ]; then
        ip netns add "msl-$node"
        ip link add "msl$k" type veth peer name eth0 netns "msl-$node"
        ip link set "msl$k" master $BRIDGE up
        ip -n "msl-$node" link set lo up
        ip -n "msl-$node" addr add "$NET.$k/24" dev eth0
        ip -n "msl-$node" link set eth0 up
    fi
    # Process 1 of the node is a bash that reaps orphans. --kill-child: the whole node dies with unshare.
    setsid ip netns exec "msl-$node" unshare --uts --ipc --pid --fork --kill-child --mount --mount-proc \
        bash -c 'hostname "$0"; mount -t tmpfs tmpfs /dev/shm; slurmd || exit 1
                 trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done' "$node" </dev/null >>"$DIR/node-$node.log" 2>&1 &
    echo $! >"$DIR/node-$node.pid"  # ip netns exec becomes unshare: the same pid
}

kill_node() {
    local node=$1 process parent steps=() tasks=()
    if netns; then
        stop_pid "$DIR/node-$node.pid" unshare KILL
        rm -f "$DIR/slurmd-$node.pid"
        return
    fi
    stop_pid "$DIR/slurmd-$node.pid" slurmd KILL
    for process in /proc/[0-9]*; do  # tasks carry the node's name; their slurmstepd is the parent, and goes first
        { tr '\0' '\n' <"$process/environ"; } 2>/dev/null | grep -qx "SLURMD_NODENAME=$node" || continue
        case $(cat "$process/comm" 2>/dev/null) in slurmctld | slurmd | munged) continue ;; esac
        tasks+=("${process#/proc/}")
        parent=$(awk '{print $4}' "$process/stat" 2>/dev/null || true)
        [ "$(cat "/proc/$parent/comm" 2>/dev/null)" != slurmstepd ] || steps+=("$parent")
    done
    [ ${#tasks[@]} = 0 ] || kill -KILL "${steps[@]}" "${tasks[@]}" 2>/dev/null || true
}

wait_nodes() {  # until every node answers, 2 minutes at most
    for _ in $(seq 600); do
        if [ -n "$(sinfo -h 2>/dev/null)" ] && ! sinfo -h -N -o %T | grep -vqE '^(idle|mixed|allocated|completing)$'; then return; fi
        sleep 0.2
    done
    sinfo -N -l >&2 || true
    tail -n 8 $DIR/slurm*.log >&2 || true
    die "the nodes did not come up"
}

# --- commands ---

start() {
    local n=$1 node
    if alive $DIR/slurmctld.pid slurmctld; then
        [ "$(nodes | wc -l)" = "$n" ] || die "runs already with $(nodes | wc -l) nodes: stop it first"
    else
        stop  # what a killed run left
        install -d -m 755 $DIR
        mkdir $DIR/state $DIR/spool $DIR/tmp
        install -d -m 700 $DIR/key
        head -c 1024 /dev/urandom | install -m 600 /dev/stdin $DIR/key/munge.key
        pick_mode >$DIR/mode
        write_conf "$n" >$SLURM_CONF
        write_devices "$n"
        write_hosts "$n"
        if netns; then
            ip link add $BRIDGE type bridge
            ip addr add $NET.254/24 dev $BRIDGE
            ip link set $BRIDGE up
        fi
        munged --force --key-file=$DIR/key/munge.key --seed-file=$DIR/key/munge.seed --socket=$DIR/munge.socket \
            --pid-file=$DIR/munged.pid --log-file=$DIR/munged.log --num-threads=2 2>/dev/null
        slurmctld -c
    fi
    for node in $(nodes); do start_node "$node"; done
    wait_nodes
    echo "minislurm: $n nodes, $(cat $DIR/mode) mode; export SLURM_CONF=$SLURM_CONF"
}

stop() {
    local node
    stop_pid $DIR/slurmctld.pid slurmctld KILL  # its state is thrown away, so no orderly end
    for node in $(nodes); do
        kill_node "$node"
        [ ! -e "/run/netns/msl-$node" ] || ip netns del "msl-$node"
        ip link del "msl${node#n}" 2>/dev/null || true
    done
    stop_pid $DIR/munged.pid munged
    ip link del $BRIDGE 2>/dev/null || true
    ! grep -q '# minislurm$' /etc/hosts || write_hosts
    rm -rf $DIR
}

case ${1:-} in
    install) install_packages ;;
    start) start "${2:-2}" ;;
    stop) stop ;;
    status) sinfo -N -o '%N %T %c cpus %G %E'; squeue -o '%i %j %T %M %D %R' ;;
    fail)
        kill_node "$2"
        [ "${3:-}" != now ] || scontrol update nodename="$2" state=down reason="power cut"
        ;;
    recover) start_node "$2"; wait_nodes ;;
    *) sed -n '2,/^set/{/^set/!p}' "$0"; exit 2 ;;
esac
