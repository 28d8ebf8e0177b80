"""Corpora to cleaned text, streaming: inputs are found by name, cut into blocks of bytes, and blocks are parsed."""

from data_prep.readers.blocks import TextBlock, text_blocks
from data_prep.readers.find import find_documents, find_pairs
from data_prep.readers.inputs import FORMATS, Input
from data_prep.readers.parse import Paragraphs, block_documents, block_pairs, block_paragraphs, documents, pairs

__all__ = [
    "FORMATS",
    "Input",
    "Paragraphs",
    "TextBlock",
    "block_documents",
    "block_pairs",
    "block_paragraphs",
    "documents",
    "find_documents",
    "find_pairs",
    "pairs",
    "text_blocks",
]
