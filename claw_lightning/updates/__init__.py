"""How each network learns, one file per family; module.py says in which order and how often."""
