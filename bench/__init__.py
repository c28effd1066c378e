"""What a checkpoint costs training and how long until it is durable, beside the engine's peers."""
