"""Where texts come from: a grammar of small stories, pairs of sentences, files and
downloads.
"""
