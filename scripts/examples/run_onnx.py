"""Play an exported policy in a Gymnasium task, with onnxruntime and gymnasium alone.

    python scripts/examples/run_onnx.py policy.onnx --episodes 5

The task is the one that the file names. Tasks of gymnasium-robotics are registered where it is installed.
"""

import argparse
import contextlib
import json

import gymnasium
import numpy as np
import onnxruntime

parser = argparse.ArgumentParser(description="Play an exported policy")
parser.add_argument("policy", help="a file of scripts/export.py")
parser.add_argument("--episodes", type=int, default=5)
parser.add_argument("--task", help="another name of the same task")
arguments = parser.parse_args()

with contextlib.suppress(ImportError):
    import gymnasium_robotics

    gymnasium.register_envs(gymnasium_robotics)
policy = onnxruntime.InferenceSession(arguments.policy)
about = {name: json.loads(value) for name, value in policy.get_modelmeta().custom_metadata_map.items()}
outputs = list(about["outputs"])
if {"image", "uniform"} & set(about["inputs"]):
    parser.error("this example is for policies that need neither images nor random numbers")
env = gymnasium.make(arguments.task or about["task"])
for episode in range(arguments.episodes):
    obs, total, done = env.reset(seed=episode)[0], 0.0, False
    kept = {"option": np.zeros(1, np.int64), "steps": np.zeros(1, np.int64), "first": np.array([True])}
    while not done:
        if isinstance(obs, dict):  # in this order; see docs/export.md
            obs = np.concatenate([obs[name] for name in ("observation", "achieved_goal", "desired_goal")])
        given = {"obs": np.asarray(obs, np.float32).reshape(1, -1), **kept}
        found = dict(zip(outputs, policy.run(outputs, {name: given[name] for name in about["inputs"]}), strict=True))
        kept = {"option": found.get("next_option"), "steps": found.get("next_steps"), "first": np.array([False])}
        obs, reward, terminated, truncated, _ = env.step(found["action"][0])
        total, done = total + float(reward), terminated or truncated
    print(f"episode {episode}: return {total:.1f}")
