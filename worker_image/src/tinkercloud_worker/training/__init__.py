"""Steps shared by all trainers: batches of micro-batches, Adam, replicas."""
