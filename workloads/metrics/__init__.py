"""Scores of replies: word F1, Rouge-L, CacheBlend's variants."""
