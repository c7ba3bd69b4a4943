"""Scores of replies: word F1, string match, Rouge-L, CacheBlend's variants."""
