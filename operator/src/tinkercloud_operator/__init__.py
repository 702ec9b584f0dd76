"""The operator: reconciles TrainingSessions into RayClusters and what surrounds them."""
