"""Collection on other machines, by Ray: the same workers, in processes of any node of a cluster. See docs/ray.md.

``blocks``: rows of one ring as bytes, and into another. ``host``: the actor beside a worker's process, on its node.
``worker``: the learner's view of such a worker. ``cluster``: the connection, and the threads that serve it. ``config``:
the settings. Ray itself is imported by ``cluster`` alone, and only when a run begins that uses it.
"""
