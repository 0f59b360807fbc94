"""What every other room needs: refusals, files, interrupts, processes, modes."""
