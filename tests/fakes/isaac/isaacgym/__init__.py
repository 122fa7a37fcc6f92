"""Stand-in for Isaac Gym's bindings: only as far as a task and its worker can see them."""

from isaacgym import gymdeps

gymdeps.check_interpreter()
gymdeps.check_order()
gymdeps.announce()
