"""What several examples share: command line, data of one's own, folder of a run, training by time, saved models."""
