"""What every other room needs: one sentence for each bad argument, files that are
replaced as a whole, Ctrl-C that waits, work in several processes, and modes of a model.
"""
