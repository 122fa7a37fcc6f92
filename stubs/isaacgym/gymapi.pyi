class SimType: ...

SIM_PHYSX: SimType

class PhysXParams:
    solver_type: int
    num_position_iterations: int
    num_velocity_iterations: int
    num_threads: int
    num_subscenes: int
    max_gpu_contact_pairs: int
    use_gpu: bool

class SimParams:
    dt: float
    substeps: int
    num_client_threads: int
    use_gpu_pipeline: bool
    physx: PhysXParams
