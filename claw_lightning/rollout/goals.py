"""Rewards of goal-conditioned tasks as plain data, for whoever relabels goals far away from the simulator.

A learner that puts another goal in the place of the desired one needs the reward that the task would have given. The
task may live in another process and another interpreter, so its adapter describes the reward by a few plain values
(:attr:`~claw_lightning.rollout.envs.base.EnvSpec.goal_reward`), and :func:`goal_reward` makes a function of them:

================  ===================================================================================================
kind              further settings, all of them required unless said otherwise
================  ===================================================================================================
``distance``      ``threshold`` (in the units of the goal), ``sparse``
``pose``          ``position``, ``rotation``, ``ignore_z`` (switches), ``position_threshold`` (m),
                  ``rotation_threshold`` (rad), ``sparse``
``function``      ``path`` ("package.module:function"), ``arguments`` (keywords; may be left out)
================  ===================================================================================================
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any, Callable, Dict, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import EnvError

GoalReward = Callable[[np.ndarray, np.ndarray], np.ndarray]

_SWITCH, _NUMBER, _TEXT, _KEYWORDS = "true or false", "a finite number", "a text", "a mapping of keywords"
_SETTINGS: Dict[str, Dict[str, str]] = {
    "distance": {"threshold": _NUMBER, "sparse": _SWITCH},
    "pose": {
        "position": _SWITCH,
        "rotation": _SWITCH,
        "ignore_z": _SWITCH,
        "position_threshold": _NUMBER,
        "rotation_threshold": _NUMBER,
        "sparse": _SWITCH,
    },
    "function": {"path": _TEXT, "arguments": _KEYWORDS},
}
_POSE_SIZE = 7  # position, then a quaternion w, x, y, z
#: What a metre weighs against a radian in the dense reward of the manipulation tasks.
_POSITION_WEIGHT = 10.0
#: Below this cosine of the middle angle the outer two turn about one axis, and the first of them is taken as 0.
_GIMBAL_LOCK = 4 * float(np.finfo(np.float64).eps)


def plain_settings(settings: Any) -> Dict[str, Any]:
    """The settings of a reward, checked, in values that JSON returns unchanged (lists for tuples, no numpy).

    Nothing is imported: a ``function`` is looked up by :func:`goal_reward`, where it has to run.

    Raises:
        EnvError: unknown kind, a setting too many, too few or of the wrong type.
    """
    if not isinstance(settings, dict):
        raise EnvError("goal_reward: must be a mapping with the key 'kind', not %r" % (settings,))
    kind = settings.get("kind")
    if not isinstance(kind, str) or kind not in _SETTINGS:
        raise EnvError("goal_reward.kind: must be one of %s, not %r" % (", ".join(_SETTINGS), kind))
    given = {name: _plain(value) for name, value in settings.items()}
    if kind == "function":
        given.setdefault("arguments", {})
    expected = _SETTINGS[kind]
    for name in given:
        if name not in expected and name != "kind":
            raise EnvError("goal_reward.%s: kind '%s' has only %s" % (name, kind, ", ".join(expected)))
    for name, wanted in expected.items():
        if name not in given:
            raise EnvError("goal_reward.%s: missing; kind '%s' needs %s" % (name, kind, wanted))
        if not _fits(given[name], wanted):
            raise EnvError("goal_reward.%s: must be %s, not %r" % (name, wanted, given[name]))
    return given


def goal_reward(settings: Dict[str, Any]) -> GoalReward:
    """Function (achieved [.., G], desired [.., G]) -> rewards [..] float32; the leading axes are broadcast.

    ``distance``: minus the Euclidean distance, or, where ``sparse``, -1 beyond the threshold and 0 elsewhere: Fetch and
    HandReach. ``pose``: the HandManipulate tasks, see :func:`pose_distance`; minus (10 position + rotation), or 0 where
    both lie below their thresholds and -1 elsewhere. ``function``: the user's own, called with the two arrays as they
    are and with ``arguments``.

    The simulators compare in float64 what a float32 observation then tells to within its rounding, 1e-7 or so. Hence
    all is computed in float64 and rounded once, at the end. In float32 a difference of two coordinates of about 1 m,
    or an arc cosine near 1, would lose more than the observation did, and a threshold such as 0.01 would itself move.

    Raises:
        EnvError: wrong settings, or a function that cannot be imported or does not take the arguments. From the
            returned function: the user's own answered with another shape.
        ValueError: from the returned function, for goals of wrong or different sizes.
    """
    settings = plain_settings(settings)
    kind = settings.pop("kind")
    if kind == "function":
        return _user_reward(**settings)
    return _pose_reward(**settings) if kind == "pose" else _distance_reward(**settings)


def pose_distance(
    achieved: np.ndarray, desired: np.ndarray, position: bool, rotation: bool, ignore_z: bool
) -> Tuple[np.ndarray, np.ndarray]:
    """Distances in m and rad between poses [.., 7] (x, y, z, then a quaternion w, x, y, z) -> two arrays [..] float64.

    The angle is 2 arccos(w) of the quaternion between the two, as the tasks compute it: in [0, 2 pi], and 2 pi for
    two quaternions of opposite sign, although they are one rotation. A goal is reached on one of the two covers only.
    With ``ignore_z`` the achieved quaternion is made anew from its angles, always on the cover of their halves. A goal
    on the other one is out of reach: 1 in 13 of those that the pen tasks draw. So the tasks compute it, and so it
    stays; whoever makes a goal of what was achieved may choose the sign at which the goal's distance to itself is 0.

    Args:
        achieved: [.., 7].
        desired: [.., 7].
        position: whether positions are compared; if not, their distance is 0.
        rotation: the same for rotations.
        ignore_z: the last of the achieved rotation's three Euler angles (turns about the body's own x, then y, then z)
            is replaced by that of the desired one: how a pen is rolled about itself does not matter.
    """
    achieved, desired = np.asarray(achieved, np.float64), np.asarray(desired, np.float64)
    shape = np.broadcast(achieved[..., 0], desired[..., 0]).shape
    metres, radians = np.zeros(shape), np.zeros(shape)
    if position:
        metres = np.linalg.norm(achieved[..., :3] - desired[..., :3], axis=-1)
    if rotation:
        # Units again after their way through float32: 1e-7 missing from the length looks like 1e-3 rad.
        ours, theirs = _unit(achieved[..., 3:]), _unit(desired[..., 3:])
        if ignore_z:
            x, y, _ = _euler_angles(ours)
            ours = _from_euler_angles(x, y, _euler_angles(theirs)[2])
        # The real part of a product with a conjugate is the scalar product of the two.
        radians = 2.0 * np.arccos(np.clip((ours * theirs).sum(axis=-1), -1.0, 1.0))
    return metres, radians


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(inner) for inner in value]
    return value


def _fits(value: Any, wanted: str) -> bool:
    if wanted == _NUMBER:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if wanted == _KEYWORDS:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return isinstance(value, bool if wanted == _SWITCH else str)


def _checked(achieved: np.ndarray, desired: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    # Broadcasting must not stretch the goals themselves.
    achieved, desired = np.asarray(achieved), np.asarray(desired)
    if not achieved.ndim or not desired.ndim or achieved.shape[-1] != desired.shape[-1]:
        raise ValueError("goals have shapes %s and %s, expected [.., G] twice" % (achieved.shape, desired.shape))
    return achieved, desired


def _distance_reward(threshold: float, sparse: bool) -> GoalReward:
    def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        achieved, desired = _checked(achieved, desired)
        distance = np.linalg.norm(achieved.astype(np.float64) - desired.astype(np.float64), axis=-1)
        return np.asarray(np.where(distance > threshold, -1.0, 0.0) if sparse else -distance, np.float32)

    return reward


def _pose_reward(
    position: bool, rotation: bool, ignore_z: bool, position_threshold: float, rotation_threshold: float, sparse: bool
) -> GoalReward:
    def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        achieved, desired = _checked(achieved, desired)
        if achieved.shape[-1] != _POSE_SIZE:
            raise ValueError("goals have shape %s, expected [.., %d]" % (achieved.shape, _POSE_SIZE))
        metres, radians = pose_distance(achieved, desired, position, rotation, ignore_z)
        if not sparse:
            return np.asarray(-(_POSITION_WEIGHT * metres + radians), np.float32)
        is_there = (metres < position_threshold) & (radians < rotation_threshold)
        return np.asarray(np.where(is_there, 0.0, -1.0), np.float32)

    return reward


def _unit(quaternion: np.ndarray) -> np.ndarray:
    """[.., 4] -> [.., 4] of length 1; zeros stay zeros."""
    length = np.linalg.norm(quaternion, axis=-1, keepdims=True)
    return quaternion / np.where(length > 0.0, length, 1.0)


def _euler_angles(unit: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit quaternions [.., 4] -> angles x, y, z, each [..], such that the rotation is Rx(x) Ry(y) Rz(z)."""
    w, x, y, z = (unit[..., index] for index in range(4))
    # Entries of the rotation matrix, by row and column.
    m02, m12, m22 = 2 * (x * z + w * y), 2 * (y * z - w * x), 1 - 2 * (x * x + y * y)
    cosine = np.hypot(m22, m12)
    is_free = cosine > _GIMBAL_LOCK
    first = np.where(is_free, np.arctan2(-m12, m22), 0.0)
    last = np.where(
        is_free,
        np.arctan2(-2 * (x * y - w * z), 1 - 2 * (y * y + z * z)),
        np.arctan2(2 * (x * y + w * z), 1 - 2 * (x * x + z * z)),
    )
    return first, np.arctan2(m02, cosine), last


def _from_euler_angles(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Angles [..] -> unit quaternions [.., 4] of Rx(x) Ry(y) Rz(z), on the cover that the half angles lead to."""
    (cx, cy, cz), (sx, sy, sz) = ([function(angle / 2) for angle in (x, y, z)] for function in (np.cos, np.sin))
    return np.stack(
        np.broadcast_arrays(
            cx * cy * cz - sx * sy * sz,
            sx * cy * cz + cx * sy * sz,
            cx * sy * cz - sx * cy * sz,
            cx * cy * sz + sx * sy * cz,
        ),
        axis=-1,
    )


def _user_reward(path: str, arguments: Dict[str, Any]) -> GoalReward:
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        raise EnvError("goal_reward.path: must read package.module:function, not %r" % path)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise EnvError("goal_reward.path: cannot import %s (%s)" % (module_name, _one_line(error))) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise EnvError("goal_reward.path: module %s has no function %s" % (module_name, name))
    try:
        inspect.signature(function).bind(None, None, **arguments)
    except TypeError as error:
        raise EnvError("goal_reward.arguments: %s does not take them: %s" % (path, _one_line(error))) from error
    except ValueError:
        pass  # some compiled functions have no signature to compare with

    def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
        achieved, desired = _checked(achieved, desired)
        found = np.asarray(function(achieved, desired, **arguments), np.float32)
        expected = np.broadcast(achieved[..., 0], desired[..., 0]).shape
        if found.shape != expected:
            raise EnvError(
                "goal_reward.path: %s gave shape %s instead of %s; it must be vectorised"
                % (path, found.shape, expected)
            )
        return found

    return reward


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
