"""The writer process: takes a staged shard out of the trainer's hands and makes it durable, whoever dies."""
