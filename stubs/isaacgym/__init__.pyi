# The part of Isaac Gym Preview 4 that this project uses, written from its use; the whole of it has no type information.
