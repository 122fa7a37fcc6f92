"""Categorical critics against a slow reference, and their means against the scalar equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from claw_lightning import distributional as dist
from claw_lightning.losses import arrival_value, td_target

NAN = math.nan


def table(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_probs(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1).to(dtype)


def inner_probs(seed: int, *shape: int, margin: int = 5) -> Tensor:
    """Without mass on the outermost `margin` atoms, so that nothing leaves the support when it is moved a little."""
    probs = random_probs(seed, *shape)
    probs[..., :margin] = 0
    probs[..., -margin:] = 0
    return probs / probs.sum(-1, keepdim=True)


def slow_projection(probs: Tensor, reward: float, discount: float, z: Tensor) -> Tensor:
    """One distribution, atom by atom, by the triangular kernel of the paper's equation."""
    spacing = float(z[1] - z[0])
    result = torch.zeros_like(z)
    for j in range(len(z)):
        moved = min(max(reward + discount * float(z[j]), float(z[0])), float(z[-1]))
        for i in range(len(z)):
            result[i] += probs[j] * max(0.0, 1 - abs(moved - float(z[i])) / spacing)
    return result


class TestSupport:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values(self, dtype: torch.dtype) -> None:
        z = dist.support(-10.0, 10.0, 51, dtype=dtype)
        assert z.dtype == dtype
        torch.testing.assert_close(z, torch.tensor([-10 + 0.4 * i for i in range(51)], dtype=dtype))

    @pytest.mark.parametrize("arguments", [(0.0, 1.0, 1), (1.0, 1.0, 5), (1.0, -1.0, 5), (NAN, 1.0, 5)])
    def test_refusals(self, arguments: tuple[float, float, int]) -> None:
        with pytest.raises(ValueError, match="two atoms"):
            dist.support(*arguments)

    def test_mean(self) -> None:
        assert dist.mean(table([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), table([-1.0, 0.0, 1.0])).tolist() == [-0.5, 1.0]


class TestProjection:
    Z = dist.support(-3.0, 5.0, 17, dtype=torch.float64)

    @pytest.mark.parametrize("seed", range(3))
    def test_slow_reference(self, seed: int) -> None:
        """Inside, partly outside and wholly outside the support."""
        probs = random_probs(seed, 6, 17)
        reward, discount = table([0.3, -1.7, 4.0, 40.0, -40.0, 0.25]), table([0.9, 0.5, 0.99, 0.9, 0.9, 0.0])
        expected = [slow_projection(p, r, d, self.Z) for p, r, d in zip(probs, reward.tolist(), discount.tolist())]
        actual = dist.project(probs, reward, discount, self.Z)
        torch.testing.assert_close(actual, torch.stack(expected), rtol=0, atol=1e-12)
        assert actual[3, -1].item() == pytest.approx(1)
        assert actual[4, 0].item() == pytest.approx(1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_mass_is_kept(self, dtype: torch.dtype) -> None:
        z = dist.support(-250.0, 250.0, 101, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        reward = 200 * torch.randn(1000, generator=generator).to(dtype)
        discount = torch.rand(1000, generator=generator).to(dtype)
        discount[::4] = 1.0
        reward[::8] = (5 * torch.randint(-20, 20, (125,), generator=generator)).to(dtype)  # on atoms exactly
        projected = dist.project(random_probs(1, 1000, 101, dtype=dtype), reward, discount, z)
        assert projected.dtype == dtype
        assert (projected >= 0).all()
        torch.testing.assert_close(projected.sum(-1), torch.ones(1000, dtype=dtype))

    @pytest.mark.parametrize("seed", range(3))
    def test_mean_is_kept_inside_the_support(self, seed: int) -> None:
        probs = random_probs(seed, 4, 3, 17)
        reward, discount = 0.4 * torch.rand(4, 3, dtype=torch.float64), 0.8 * torch.rand(4, 3, dtype=torch.float64)
        projected = dist.project(probs, reward, discount, self.Z)
        expected = reward + discount * dist.mean(probs, self.Z)
        torch.testing.assert_close(dist.mean(projected, self.Z), expected, rtol=0, atol=1e-12)

    def test_mean_is_the_scalar_target(self) -> None:
        """Mean of the projected U = td_target of the mean of U, ends included."""
        probs, reward = random_probs(3, 5, 17), table([0.1, 0.2, 0.3, 0.4, 0.5])
        terminated = torch.tensor([False, True, False, True, False])
        projected = dist.project(probs, reward, 0.8 * (~terminated).double(), self.Z)
        expected = td_target(reward, terminated, dist.mean(probs, self.Z), 0.8)
        torch.testing.assert_close(dist.mean(projected, self.Z), expected)

    def test_standing_still(self) -> None:
        """Nothing moves with reward 0 and discount 1: positions fall on atoms, whose mass must not be lost."""
        probs = random_probs(4, 8, 17)
        projected = dist.project(probs, torch.zeros(8).double(), torch.ones(8).double(), self.Z)
        torch.testing.assert_close(projected, probs, rtol=0, atol=1e-12)

    def test_one_step_by_hand(self) -> None:
        z = table([0.0, 1.0, 2.0])
        projected = dist.project(table([[0.5, 0.5, 0.0]]), table([0.25]), table([0.5]), z)
        assert torch.equal(projected, table([[0.5 * 0.75 + 0.5 * 0.25, 0.5 * 0.25 + 0.5 * 0.75, 0.0]]))

    def test_what_stands_after_an_end_does_not_leak(self) -> None:
        probs = random_probs(5, 2, 17)
        probs[0] = NAN
        projected = dist.project(probs, table([1.0, 1.0]), table([0.0, 0.9]), self.Z)
        assert projected[0].tolist() == [1.0 if i == 8 else 0.0 for i in range(17)]
        assert projected.isfinite().all()

    def test_bad_rewards_stay_in_their_rows(self) -> None:
        reward = table([NAN, math.inf, 0.5])
        projected = dist.project(random_probs(6, 3, 17), reward, table([0.9, 0.9, 0.9]), self.Z)
        assert projected[0].isnan().any()
        assert projected[1, -1].item() == pytest.approx(1)
        assert projected[2].sum().item() == pytest.approx(1)

    def test_constant(self) -> None:
        probs = random_probs(7, 2, 17).requires_grad_()
        assert not dist.project(probs, table([0.0, 0.0]), table([0.9, 0.9]), self.Z).requires_grad

    def test_settles_on_the_value_of_a_reward_stream(self) -> None:
        """Reward 1 and discount 0.5 for ever: repeated projection settles on the value 2."""
        z = dist.support(-1.0, 4.0, 26, dtype=torch.float64)
        probs = random_probs(3, 1, 26)
        for _ in range(60):
            probs = dist.project(probs, table([1.0]), table([0.5]), z)
        assert dist.mean(probs, z).item() == pytest.approx(2, abs=1e-9)


class TestOptions:
    Z = dist.support(-2.0, 2.0, 41, dtype=torch.float64)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        beta = torch.rand(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return inner_probs(seed, 6, 3, 41), random_probs(seed + 100, 6, 3), beta

    @pytest.mark.parametrize("seed", range(3))
    def test_mean_is_the_arrival_value(self, seed: int) -> None:
        probs, option_probs, beta = self.inputs(seed)
        mixed = dist.mix_options(probs, option_probs, beta)
        expected = arrival_value(dist.mean(probs, self.Z), option_probs, beta, 0.0)
        torch.testing.assert_close(dist.mean(mixed, self.Z), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(mixed.sum(-1), torch.ones_like(beta))
        assert (mixed >= 0).all()

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.37])
    def test_mean_with_cost(self, seed: int, cost: float) -> None:
        probs, option_probs, beta = self.inputs(seed)
        mixed = dist.mix_options_with_cost(probs, option_probs, beta, self.Z, cost)
        expected = arrival_value(dist.mean(probs, self.Z), option_probs, beta, cost)
        torch.testing.assert_close(dist.mean(mixed, self.Z), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(mixed.sum(-1), torch.ones_like(beta))
        if cost == 0:
            torch.testing.assert_close(mixed, dist.mix_options(probs, option_probs, beta))
        tensor_cost = dist.mix_options_with_cost(probs, option_probs, beta, self.Z, table(cost))
        torch.testing.assert_close(tensor_cost, mixed)

    def test_cost_at_the_lower_end(self) -> None:
        """Mass on the lowest atom cannot move: the mean falls by less than beta c, never by more."""
        probs = torch.zeros(1, 2, 41, dtype=torch.float64)
        probs[..., 0] = 1
        half = table([[0.5, 0.5]])
        assert torch.equal(dist.mix_options_with_cost(probs, half, half, self.Z, 0.3), probs)

    def test_extremes_of_beta(self) -> None:
        probs, option_probs, beta = self.inputs(3)
        torch.testing.assert_close(dist.mix_options(probs, option_probs, torch.zeros_like(beta)), probs)
        always = dist.mix_options(probs, option_probs, torch.ones_like(beta))
        torch.testing.assert_close(always[:, 0], torch.einsum("bk,bkz->bz", option_probs, probs))
        torch.testing.assert_close(always[:, 0], always[:, 2])

    def test_by_hand(self) -> None:
        probs = table([[[1.0, 0.0], [0.0, 1.0]]])
        mixed = dist.mix_options(probs, table([[0.25, 0.75]]), table([[0.5, 1.0]]))
        assert torch.equal(mixed, table([[[0.5 + 0.125, 0.375], [0.25, 0.75]]]))

    def test_widening_is_bounded(self) -> None:
        """The projection of the switched part adds at most a quarter of the spacing squared to its variance."""
        probs, option_probs, beta = self.inputs(4)
        beta = torch.ones_like(beta)

        def variance(values: Tensor) -> Tensor:
            return dist.mean(values, self.Z.square()) - dist.mean(values, self.Z).square()

        wider = variance(dist.mix_options_with_cost(probs, option_probs, beta, self.Z, 0.05))
        added = wider - variance(dist.mix_options(probs, option_probs, beta))
        torch.testing.assert_close(added, torch.full_like(added, 0.1**2 / 4))


class TestTwins:
    Z = dist.support(-2.0, 2.0, 11, dtype=torch.float64)

    def test_whole_distribution_of_the_smaller_mean(self) -> None:
        twins = random_probs(0, 2, 5, 3, 11)
        lower, means = dist.lower_twin(twins, self.Z), dist.mean(twins, self.Z)
        assert torch.equal(dist.mean(lower, self.Z), means.amin(0))
        assert {0, 1} == set(means.argmin(0).flatten().tolist())
        for b in range(5):
            for option in range(3):
                assert torch.equal(lower[b, option], twins[means[:, b, option].argmin(), b, option])

    def test_any_number_of_critics_and_dimensions(self) -> None:
        assert torch.equal(dist.lower_twin(random_probs(1, 1, 4, 11), self.Z), random_probs(1, 1, 4, 11)[0])
        three = random_probs(2, 3, 11)
        assert torch.equal(dist.mean(dist.lower_twin(three, self.Z), self.Z), dist.mean(three, self.Z).min())

    def test_twin_before_mixing(self) -> None:
        """U of the minimum per option, as the scalar critics have it; the other order is never smaller."""
        twins, option_probs = random_probs(3, 2, 50, 3, 11), random_probs(4, 50, 3)
        beta = random_probs(5, 50, 3)
        minimum = dist.mean(twins, self.Z).amin(0)
        expected = arrival_value(minimum, option_probs, beta, 0.0)
        mixed = dist.mean(dist.mix_options(dist.lower_twin(twins, self.Z), option_probs, beta), self.Z)
        torch.testing.assert_close(mixed, expected)
        each = torch.stack([dist.mix_options(twin, option_probs, beta) for twin in twins])
        late = dist.mean(dist.lower_twin(each, self.Z), self.Z)
        assert (late >= mixed - 1e-12).all()
        assert (late > mixed + 1e-3).any()


class TestCrossEntropy:
    def test_value(self) -> None:
        logits, target = torch.randn(2, 5, 7, dtype=torch.float64), random_probs(0, 5, 7)
        expected = sum(torch.nn.functional.cross_entropy(logit, target) for logit in logits)
        torch.testing.assert_close(dist.cross_entropy(logits, target, torch.full((5,), 3.0).double()), expected)
        torch.testing.assert_close(dist.cross_entropy(logits, target), expected)

    def test_weight(self) -> None:
        logits, target = torch.randn(2, 2, 7, dtype=torch.float64), random_probs(1, 2, 7)
        rows = [dist.cross_entropy(logits[:, i : i + 1], target[i : i + 1]) for i in range(2)]
        weighted = dist.cross_entropy(logits, target, table([3.0, 1.0]))
        torch.testing.assert_close(weighted, (3 * rows[0] + rows[1]) / 4)
        assert dist.cross_entropy(logits, target, table([0.0, 0.0])).item() == 0

    def test_gradient(self) -> None:
        """softmax - target for every critic, nothing into the target; zero where they agree."""
        target = random_probs(2, 4, 7).requires_grad_()
        logits = torch.stack([target.detach().log() + 3, torch.randn(4, 7, dtype=torch.float64)]).requires_grad_()
        dist.cross_entropy(logits, target).backward()
        assert target.grad is None
        assert logits.grad is not None
        torch.testing.assert_close(logits.grad, (logits.detach().softmax(-1) - target.detach()) / 4)
        assert logits.grad[0].abs().max() < 1e-12


class TestContract:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_nothing_is_cast(self, dtype: torch.dtype) -> None:
        z, probs = dist.support(-1.0, 1.0, 5, dtype=dtype), random_probs(0, 4, 3, 5, dtype=dtype)
        weights = random_probs(1, 4, 3, dtype=dtype)
        results = [
            dist.mean(probs, z),
            dist.project(probs, weights, weights, z),
            dist.mix_options(probs, weights, weights),
            dist.mix_options_with_cost(probs, weights, weights, z, 0.1),
            dist.lower_twin(probs, z),
            dist.cross_entropy(probs, probs[0], weights[0]),
        ]
        assert {result.dtype for result in results} == {dtype}

    def test_silent_broadcasts_are_refused(self) -> None:
        z, cube, square, row = torch.arange(3.0), torch.ones(3, 3, 3), torch.ones(3, 3), torch.ones(3)
        wrong: list[Callable[[], Tensor]] = [
            lambda: dist.mean(square, z[:2]),
            lambda: dist.mean(square, square),
            lambda: dist.project(square, row[:, None], row, z),
            lambda: dist.project(square, row, row[:1], z),
            lambda: dist.project(square, row, row, z[:2]),
            lambda: dist.mix_options(cube, row, square),
            lambda: dist.mix_options(cube, square, square[:, :1]),
            lambda: dist.mix_options_with_cost(cube, square, square, z[:2], 0.1),
            lambda: dist.lower_twin(cube, z[:2]),
            lambda: dist.cross_entropy(cube, row, row),
            lambda: dist.cross_entropy(cube, square, square),
        ]
        for call in wrong:
            with pytest.raises(ValueError, match="shapes differ"):
                call()
