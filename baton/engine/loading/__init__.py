"""Reading of model weights from files, and the engine's memory."""
