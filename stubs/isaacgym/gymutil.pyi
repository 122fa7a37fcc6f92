from typing import Any

from isaacgym.gymapi import SimParams

def parse_sim_config(sim_cfg: dict[str, Any], sim_options: SimParams) -> None: ...
