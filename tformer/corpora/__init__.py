"""Where texts come from: stories, sentence pairs, files and downloads."""
