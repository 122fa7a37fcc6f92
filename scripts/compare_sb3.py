"""Compare this product with stable-baselines3 TD3: same task, same recipe, same cores, same wall time.

Both arms learn HandReachDense-v3 (Shadow Hand) in the EnvPool simulator. Time runs from the start of each process, so
that imports and warm-up count. At the marks each arm writes a snapshot; after the training, every snapshot plays the
same noise-free episodes. Runs follow one another, never side by side, and the arms take turns in going first.

    make compare
    python scripts/compare_sb3.py --arms claw --num-options 4 --minutes 6 15 --json k4.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NoReturn

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
#: The recipe as the product's configuration (K = 1), and the main job's own settings (K > 1).
RECIPE_CONFIG, MAIN_CONFIG = "conf/hand_reach_td3.yaml", "conf/hand_reach_dense.yaml"
TASK = "HandReachDense-v3"
ARMS = ("claw", "sb3")
MISSING_SB3 = "stable-baselines3 is missing: run `make compare` or `pip install -e '.[compare]' -c constraints.txt`"
QUICK_MINUTES = 20.0 / 60.0
#: Noise-free episodes run on seeds that no training simulator uses.
EVAL_SEED, EVAL_LANES = 900_000, 10
#: Seconds beyond the last mark after which a run counts as hung (start, last save, evaluation).
GRACE = 600.0

#: What both arms share. The product has it from its configuration file, stable-baselines3 from here.
LANES = 16
SAMPLES_PER_INSERT = 64
BATCH_SIZE = 256
GAMMA = 0.95
LEARNING_RATE = 1e-3
TAU = 0.02
ACTION_NOISE = 0.3
HIDDEN_SIZES = (256, 256)
POLICY_DELAY = 2
TARGET_NOISE, TARGET_NOISE_CLIP = 0.2, 0.5
CAPACITY = 1_000_000
WARMUP_STEPS = 1_000
OBS_CLIP = 5.0
#: Of the vector step that inserts LANES environment steps.
GRADIENT_STEPS = SAMPLES_PER_INSERT * LANES // BATCH_SIZE


class CompareError(Exception):
    """Something the user can mend, told in one line."""


# -- the command line -------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 2."""
        self.exit(2, f"compare_sb3: error: {' '.join(message.split())}\n")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check; ``minutes`` come back sorted."""
    parser = OneLineParser(prog="compare_sb3", description="Compare this product with stable-baselines3 TD3.")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="which to run (default: both)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--minutes", nargs="+", type=float, help="marks since process start (default: 3 6)")
    parser.add_argument("--episodes", type=int, default=50, help="noise-free episodes per snapshot (default: 50)")
    parser.add_argument("--num-options", type=int, default=1, help="K of the product's arm (default: 1)")
    parser.add_argument("--config", help=f"of the product's arm (default: {RECIPE_CONFIG}; K > 1: {MAIN_CONFIG})")
    parser.add_argument("--quick", action="store_true", help="one mark at 20 seconds: does everything run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results here")
    parser.add_argument("--folder", type=Path, help="logs and snapshots (default: runs/compare/<date and time>)")
    parser.add_argument("--sb3-torch-threads", type=int, default=2, help="of the sb3 arm (default: 2)")
    parser.add_argument("--sb3-env-threads", type=int, default=2, help="EnvPool threads of the sb3 arm (default: 2)")
    # How this script starts itself for one run of the sb3 arm.
    parser.add_argument("--arm", choices=["sb3"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.quick and args.minutes is not None:
        parser.error("give --quick or --minutes, not both")
    if args.config is None:
        args.config = RECIPE_CONFIG if args.num_options == 1 else MAIN_CONFIG
    if args.minutes is None:
        args.minutes = [QUICK_MINUTES] if args.quick else [3.0, 6.0]
    args.minutes = sorted(args.minutes)
    if not all(math.isfinite(m) and m > 0 for m in args.minutes):
        parser.error("--minutes must be positive")
    for name in ("minutes", "seeds", "arms"):
        if len(set(getattr(args, name))) < len(getattr(args, name)):
            parser.error(f"--{name} holds a value twice")
    if min(args.seeds) < 0:
        parser.error("--seeds cannot be negative")
    for name in ("episodes", "num_options", "sb3_torch_threads", "sb3_env_threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.arm is not None and args.out is None:
        parser.error("--arm needs --out")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: not a file in a folder that exists")
    return args


def check_arms(args: argparse.Namespace) -> None:
    """Everything that the chosen arms need is there.

    Raises:
        CompareError: something is missing.
    """
    if "sb3" in args.arms and importlib.util.find_spec("stable_baselines3") is None:
        raise CompareError(MISSING_SB3)
    if "claw" in args.arms:
        if not lightning_command().is_file():
            raise CompareError(f"{lightning_command()} is missing: run `make setup` and use its interpreter")
        if not config_path(args.config).is_file():
            raise CompareError(f"--config {args.config}: no such file")


def config_path(name: str) -> Path:
    """The file as given, else the one of the source tree."""
    given = Path(name)
    return given.resolve() if given.is_file() else ROOT / name


def schedule(arms: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """(arm, seed) in the order of running: A B, B A, A B, so that a machine that slows down treats both alike."""
    return [(arm, seed) for i, seed in enumerate(seeds) for arm in (arms if i % 2 == 0 else arms[::-1])]


def label(arm: str, num_options: int) -> str:
    """Name of an arm in the table."""
    return f"claw K={num_options}" if arm == "claw" else "sb3 TD3"


# -- child processes --------------------------------------------------------------------------------------------------


def stop_group(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    """End a child and everything in its process group: first asked, then killed."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    process.poll()


@contextmanager
def child(command: Sequence[str], cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a process group of its own, which is gone when the block is left in whatever way."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command), cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            yield process
        finally:
            stop_group(process)


def run_child(command: Sequence[str], cwd: Path, seconds: float) -> float:
    """Run to the end; returns the time at which the process was created.

    Raises:
        CompareError: it failed or hung; names the last line of its output.
    """
    import psutil

    log = cwd / "output.log"
    # Read right after the start: a child that has already failed is still there until it is waited for.
    with child(command, cwd, log) as process:
        created = psutil.Process(process.pid).create_time()
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CompareError(f"no end after {seconds:.0f} s, killed; its output: {log}") from None
    if status != 0:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise CompareError(f"exit status {status}: {lines[-1].strip()} (all output: {log})")
    return created


# -- the product's arm ------------------------------------------------------------------------------------------------


def lightning_command() -> Path:
    """The console command beside the interpreter that runs this script."""
    return Path(sys.executable).parent / "lightning"


def claw_command(config: str, seed: int, minutes: Sequence[float], num_options: int, folder: Path) -> list[str]:
    """The product's command line for one run; snapshots go to ``folder`` as ``minute-<m>.ckpt``."""
    # Lightning counts max_time from the start of training, which is after the start of the process: the mark comes
    # first.
    total = math.ceil(60.0 * minutes[-1])
    max_time = f"{total // 86400:02d}:{total // 3600 % 24:02d}:{total // 60 % 60:02d}:{total % 60:02d}"
    return [
        str(lightning_command()), "fit",
        "--config", str(config_path(config)),
        "--model.num_options", str(num_options),
        "--seed_everything", str(seed),
        "--trainer.max_time", max_time,
        "--trainer.limit_val_batches", "0",
        "--trainer.enable_progress_bar", "false",
        "--trainer.callbacks+=RunCheckpoint",
        f"--trainer.callbacks.at_minutes={json.dumps(list(minutes))}",
        f"--trainer.callbacks.dirpath={folder}",
    ]  # fmt: skip


def run_claw(args: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train, then evaluate the snapshots. Returns one record per mark."""
    command = claw_command(args.config, seed, args.minutes, args.num_options, folder)
    created = run_child(command, folder, 60.0 * args.minutes[-1] + GRACE)
    records = []
    for minute in args.minutes:
        path = folder / f"minute-{minute:g}.ckpt"
        if not path.is_file():
            raise CompareError(f"the run left no {path}; its output: {folder / 'output.log'}")
        seconds = path.stat().st_mtime - created
        records.append({"minutes": minute, "seconds": seconds, **evaluate_claw(path, args.episodes)})
    return records


def evaluate_claw(path: Path, episodes: int, task: str = TASK, student: bool = False) -> dict[str, Any]:
    """Noise-free episodes of a checkpoint's policy, or of the ``student`` that was distilled from it."""
    from claw_lightning.module import OptionCritic
    from claw_lightning.rollout.acting import OptionAgent

    # Written by the run above; its counters are more than bare tensors.
    module = OptionCritic.load_from_checkpoint(path, map_location="cpu", weights_only=False)
    settings = {name: value for name, value in module.agent_settings().items() if name != "exploration"}
    if student and getattr(module.policy, "student", None) is None:
        raise CompareError(f"{path} holds no student")
    agent = OptionAgent(num_lanes=EVAL_LANES, seed=EVAL_SEED, evaluate=True, **settings)
    agent.load(module.policy.flatten(), 0)
    return {**play(agent, episodes, task, student), "env_steps": int(module.env_steps), "updates": int(module.updates)}


def play(agent: Any, episodes: int, task: str = TASK, student: bool = False) -> dict[str, Any]:
    """The evaluation that all arms share. ``agent`` acts on EVAL_LANES lanes like an OptionAgent."""
    from claw_lightning.rollout.collector import evaluate
    from claw_lightning.rollout.control import Control
    from claw_lightning.rollout.envs import EnvPoolEnv

    env = EnvPoolEnv(task, num_envs=EVAL_LANES, seed=EVAL_SEED)
    try:
        result = evaluate(env, agent, episodes, EVAL_SEED, Control(), student=student)
    finally:
        env.close()
    return {
        "return": fmean(result["return"]),
        "return_sd": stdev(result["return"]) if len(result["return"]) > 1 else 0.0,
        "success": fmean(result["success"]) if result["success"] else math.nan,
        "episodes": len(result["return"]),
    }


# -- the arm of stable-baselines3 -------------------------------------------------------------------------------------


class SameStepReset:
    """A simulator with next-step autoreset, spoken to as stable-baselines3 expects.

    An episode's end and the first observation of the next one come in the same step. The border step between them,
    which belongs to no episode, is taken here and never seen outside. EnvPool steps all lanes together, so this needs
    episodes of one length, as HandReach has them.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """One real step of all lanes: obs [N, O], reward [N], done [N], infos (true last observation at an end).

        Raises:
            RuntimeError: lanes ended at different steps, or a border step came at another time than after an end.
        """
        result = self.env.step(action)
        if result.is_border.any():
            raise RuntimeError("a border step without an end before it; reset the simulator first")
        done = result.terminated | result.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.env.num_envs)]
        if not done.any():
            return result.obs, result.reward, done, infos
        if not done.all():
            raise RuntimeError(f"{int(done.sum())} of {len(done)} lanes ended; all must end at the same step")
        for lane, info in enumerate(infos):
            info["terminal_observation"] = result.obs[lane]
            info["TimeLimit.truncated"] = bool(result.truncated[lane] and not result.terminated[lane])
        border = self.env.step(np.zeros_like(action))
        if not border.is_border.all():
            raise RuntimeError("the step after the end of all episodes was no border step")
        return border.obs, result.reward, done, infos


def make_vec_env(env: Any) -> Any:
    """A VecEnv of stable-baselines3 around one of our simulators."""
    from gymnasium import spaces
    from stable_baselines3.common.vec_env import VecEnv

    class SimulatorVecEnv(VecEnv):
        """All lanes in one simulator, without a process of its own."""

        def __init__(self) -> None:
            self._stepper = SameStepReset(env)
            self._action = np.zeros((env.num_envs, env.spec.action_size), np.float32)
            bounds = spaces.Box(-np.inf, np.inf, (env.spec.obs_size,), np.float32)
            super().__init__(env.num_envs, bounds, spaces.Box(-1.0, 1.0, (env.spec.action_size,), np.float32))

        def reset(self) -> Any:
            """First observations; the simulator has its seed from the start."""
            return env.reset()

        def step_async(self, actions: np.ndarray) -> None:
            """Keep the actions."""
            self._action = np.asarray(actions, np.float32)

        def step_wait(self) -> Any:
            """Simulate."""
            return self._stepper.step(self._action)

        def close(self) -> None:
            """Release the simulator."""
            env.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            """Single lanes have no attributes."""
            if attr_name == "render_mode":
                return [None] * self.num_envs
            raise AttributeError(attr_name)

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            """Single lanes have no attributes."""
            raise AttributeError(attr_name)

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            """Single lanes have no methods."""
            raise AttributeError(method_name)

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            """No lane is wrapped."""
            return [False] * self.num_envs

    return SimulatorVecEnv()


class Sb3Agent:
    """A TD3 actor with frozen observation statistics, acting like a noise-free OptionAgent with one option."""

    num_options = 1

    def __init__(self, actor: Any, mean: np.ndarray, var: np.ndarray, epsilon: float) -> None:
        self.actor, self.mean, self.scale = actor, mean, np.sqrt(var + epsilon)

    def reseed(self, seed: int) -> None:
        """Nothing is drawn."""

    def act(self, obs: np.ndarray, first: np.ndarray, image: np.ndarray | None = None) -> Any:
        """Actions [N, A] for raw observations [N, O]."""
        import torch

        from claw_lightning.rollout.acting import Decision

        x = np.clip((obs - self.mean) / self.scale, -OBS_CLIP, OBS_CLIP).astype(np.float32)
        with torch.no_grad():
            action = self.actor(torch.from_numpy(x)).numpy()
        nothing = np.zeros(len(obs), np.int32)
        return Decision(
            action=action,
            option=nothing,
            previous_option=np.where(first, -1, 0).astype(np.int32),
            age=nothing,
            switched=first,
            by_cap=np.zeros(len(obs), bool),
            log_prob_action=nothing.astype(np.float32),
            log_prob_option=nothing.astype(np.float32),
        )


def train_sb3(args: argparse.Namespace) -> int:
    """One run of the sb3 arm, in the process that this script starts for it; results go to ``args.out``."""
    import psutil

    created = psutil.Process().create_time()
    import torch
    from stable_baselines3 import TD3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    from claw_lightning.rollout.envs import EnvPoolEnv

    torch.set_num_threads(args.sb3_torch_threads)
    simulator = EnvPoolEnv(TASK, num_envs=LANES, seed=1_000 * args.seed, num_threads=args.sb3_env_threads)
    size = simulator.spec.action_size
    env = VecNormalize(make_vec_env(simulator), norm_reward=False, clip_obs=OBS_CLIP, gamma=GAMMA)
    model = TD3(
        "MlpPolicy",
        env,
        learning_rate=LEARNING_RATE,
        buffer_size=CAPACITY,
        learning_starts=WARMUP_STEPS,
        batch_size=BATCH_SIZE,
        tau=TAU,
        gamma=GAMMA,
        train_freq=(1, "step"),
        gradient_steps=GRADIENT_STEPS,
        action_noise=NormalActionNoise(np.zeros(size), np.full(size, ACTION_NOISE)),
        policy_delay=POLICY_DELAY,
        target_policy_noise=TARGET_NOISE,
        target_noise_clip=TARGET_NOISE_CLIP,
        policy_kwargs={"net_arch": list(HIDDEN_SIZES)},
        seed=args.seed,
        device="cpu",
    )
    moments: Any = env.obs_rms
    folder = args.out.parent
    snapshots: list[tuple[dict[str, Any], Path]] = []

    class Marks(BaseCallback):
        """Writes a snapshot at each mark and ends the training after the last."""

        def _on_step(self) -> bool:
            while len(snapshots) < len(args.minutes):
                minute, seconds = args.minutes[len(snapshots)], time.time() - created
                if seconds < 60.0 * minute:
                    return True
                path = folder / f"minute-{minute:g}.pt"
                torch.save([model.actor.state_dict(), moments.mean, moments.var], path)
                counters = {"env_steps": int(model.num_timesteps), "updates": int(model._n_updates)}
                snapshots.append(({"minutes": minute, "seconds": seconds, **counters}, path))
            return False

    model.learn(total_timesteps=2**60, callback=Marks(), log_interval=2**60)
    env.close()
    records = []
    for record, path in snapshots:
        weights, mean, var = torch.load(path, weights_only=False)
        model.actor.load_state_dict(weights)
        model.actor.set_training_mode(False)
        records.append({**record, **play(Sb3Agent(model.actor, mean, var, env.epsilon), args.episodes)})
    args.out.write_text(json.dumps(records))
    return 0


def sb3_command(args: argparse.Namespace, seed: int, out: Path) -> list[str]:
    """This script's command line for one run of the sb3 arm."""
    return [
        sys.executable, str(Path(__file__).resolve()),
        "--arm", "sb3",
        "--seed", str(seed),
        "--out", str(out),
        "--episodes", str(args.episodes),
        "--sb3-torch-threads", str(args.sb3_torch_threads),
        "--sb3-env-threads", str(args.sb3_env_threads),
        "--minutes", *(repr(minute) for minute in args.minutes),
    ]  # fmt: skip


def run_sb3(args: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train and evaluate in a process of its own. Returns one record per mark."""
    out = folder / "records.json"
    run_child(sb3_command(args, seed, out), folder, 60.0 * args.minutes[-1] + GRACE)
    records: list[dict[str, Any]] = json.loads(out.read_text())
    return records


# -- results ----------------------------------------------------------------------------------------------------------


def format_minutes(minutes: float) -> str:
    """Short, such as 3, 0.33 or 7.5."""
    return f"{minutes:.2f}".rstrip("0").rstrip(".")


def build_table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row per seed, mark and arm, then the means over the seeds where there are several."""
    columns = ("return", "success", "env_steps", "updates")
    lines = ["| seed | minutes | arm | return | success | env steps | updates |", "|---|---|---|---:|---:|---:|---:|"]

    def row(seed: str, minutes: float, arm: str, values: Sequence[float]) -> str:
        ret, success, steps, updates = values
        return (
            f"| {seed} | {format_minutes(minutes)} | {arm} | {ret:.2f} | {success:.2f} "
            f"| {round(steps):,} | {round(updates):,} |"
        )

    def order(record: dict[str, Any]) -> tuple[Any, ...]:
        return record["seed"], record["minutes"], record["arm"]

    for record in sorted(records, key=order):
        lines.append(row(str(record["seed"]), record["minutes"], record["arm"], [record[name] for name in columns]))
    for minutes, arm in sorted({(record["minutes"], record["arm"]) for record in records}):
        group = [record for record in records if (record["minutes"], record["arm"]) == (minutes, arm)]
        if len(group) > 1:
            means = [fmean(float(record[name]) for record in group) for name in columns]
            lines.append(row(f"mean of {len(group)}", minutes, arm, means))
    return "\n".join(lines)


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Settings that belong to the numbers."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version()}
    for name in ("claw-lightning", "torch", "envpool", "stable-baselines3"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "task": TASK,
        "minutes": args.minutes,
        "seeds": args.seeds,
        "episodes": args.episodes,
        "num_options": args.num_options,
        "cores": len(os.sched_getaffinity(0)),
        "sb3_torch_threads": args.sb3_torch_threads,
        "sb3_env_threads": args.sb3_env_threads,
        "versions": versions,
    }


def write_json(path: Path, content: Any) -> None:
    """Complete or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(content, indent=2) + "\n")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all arms and seeds one after the other; the JSON file grows with every run."""
    check_arms(args)
    root = (args.folder or Path("runs") / "compare" / time.strftime("%Y%m%d-%H%M%S")).resolve()
    records: list[dict[str, Any]] = []
    runs = schedule(args.arms, args.seeds)
    for number, (arm, seed) in enumerate(runs, 1):
        name = label(arm, args.num_options)
        folder = root / f"{arm}-seed{seed}"
        try:
            # A folder with snapshots of an earlier call could be taken for this one's.
            folder.mkdir(parents=True)
        except FileExistsError:
            raise CompareError(f"{folder} exists already: give another --folder") from None
        print(f"run {number} of {len(runs)}: {name}, seed {seed}", file=sys.stderr, flush=True)
        try:
            found = (run_claw if arm == "claw" else run_sb3)(args, seed, folder)
        except CompareError as error:
            raise CompareError(f"{name}, seed {seed}: {error}") from error
        records += [{"arm": name, "seed": seed, **record} for record in found]
        if args.json is not None:
            write_json(args.json, {"settings": describe(args), "records": records})
    return records


def stop_on_signal(number: int, frame: Any) -> NoReturn:
    """A polite kill ends this process as Ctrl-C does, by an exception, so that children go too."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(arguments)
    if args.arm == "sb3":
        return train_sb3(args)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop_on_signal)
    try:
        print(build_table(compare(args)))
    except KeyboardInterrupt:
        print("compare_sb3: interrupted", file=sys.stderr)
        return 130
    except (CompareError, OSError) as error:
        print(f"compare_sb3: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
