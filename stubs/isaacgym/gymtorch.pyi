# Imported for what its import does: it compiles the bridge between Isaac Gym and torch.
