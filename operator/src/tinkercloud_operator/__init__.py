"""The operator: reconciles TrainingSessions into RayClusters and their supporting objects."""
