"""Gates: is a run as good as a baseline that was saved before?"""
