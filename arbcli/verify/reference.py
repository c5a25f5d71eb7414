"""The model and its update again, in float64 and plain torch, to compare the real ones with.

Written from the formulas: no kernel is called, no layer of the model, and not torch's attention.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from arbcli.config.dense import ModelConfig
from arbcli.kernels.codec.decode_digits import decode_digits_reference, decode_digits_torch
from arbcli.kernels.codec.packing import unpack_trits_reference, unpack_trits_torch
from arbcli.kernels.streams.stream_weights import ROUNDS, stream_weights_reference
from arbcli.kernels.update.gradient_gains import statistic_value_reference
from arbcli.model.dense import ByteLM
from arbcli.model.packed import TernaryTensor

SLOW_WEIGHTS = 1 << 17
"""Larger matrices are decoded by the torch backend, not a weight at a time."""


def reference_weight(tensor: TernaryTensor) -> Tensor:
    """Decode a packed tensor to (N, K) float64."""
    if tensor.num_weights > SLOW_WEIGHTS:
        return decode_digits_torch(tensor.packed, torch.float32).double()
    return decode_digits_reference(tensor.packed).double()


def reference_layers(model: ByteLM) -> Iterator[tuple[str, dict[str, Tensor], Callable]]:
    """Give the (name, weights by their names, function) of embedding, blocks and head in turn."""

    def weights(*prefixes: str) -> dict[str, Tensor]:
        named = model.weights().items()
        chosen = {name: tensor for name, tensor in named if name.startswith(prefixes)}
        leaves = {name: reference_weight(tensor) for name, tensor in chosen.items()}
        return {name: leaf.requires_grad_(not chosen[name].frozen) for name, leaf in leaves.items()}

    yield "embedding", weights("embedding."), lambda ids, w: w["embedding.weight"][ids]
    for index in range(len(model.blocks)):
        prefix = f"blocks.{index}"

        def block(x, w, prefix=f"{prefix}."):
            own = {name.removeprefix(prefix): weight for name, weight in w.items()}
            return reference_block(x, own, model.config)

        yield prefix, weights(f"{prefix}."), block
    yield "head", weights("norm.", "head."), reference_logits


def reference_block(
    x: Tensor, weights: dict[str, Tensor], config: ModelConfig, window: int | None = None
) -> Tensor:
    """Compute a block's output, (B, T, D), from its input and its decoded weights by name.

    `window` is how many positions each one attends to; None is all before it, and itself. Several
    streams are (B, T, n, D), and the first block begins them.
    """
    branches = (
        lambda h: _attention_branch(h, weights, config, window),
        lambda h: _mlp(h, weights, config),
    )
    if config.streams == 1:
        for branch in branches:
            x = x + branch(x)
        return x
    if x.dim() == 3:
        x = torch.stack([x] * config.streams, dim=2)
    for name, branch in zip(("attention_streams", "mlp_streams"), branches, strict=True):
        x = _hyper_connection(x, weights, name, branch)
    return x


def _attention_branch(
    x: Tensor, weights: dict[str, Tensor], config: ModelConfig, window: int | None
) -> Tensor:
    h = _norm(x, weights["attention_norm.weight"])
    h = _attention(h @ weights["attention.qkv.weight"].T, config.heads, window)
    if config.sub_norms:
        h = _norm(h, weights["attention.sub_norm.weight"])
    return h @ weights["attention.output.weight"].T


def _mlp(x: Tensor, weights: dict[str, Tensor], config: ModelConfig) -> Tensor:
    h = _norm(x, weights["mlp_norm.weight"]) @ weights["mlp.gate_up.weight"].T
    gate, up = h[..., : config.ffn], h[..., config.ffn :]
    h = gate / (1 + torch.exp(-gate)) * up
    if config.sub_norms:
        h = _norm(h, weights["mlp.sub_norm.weight"])
    return h @ weights["mlp.output.weight"].T


def _hyper_connection(
    x: Tensor, weights: dict[str, Tensor], name: str, branch: Callable[[Tensor], Tensor]
) -> Tensor:
    """Let a branch read and write streams (B, T, n, D): B X + c F(a X)."""
    n, flat = x.shape[2], x.flatten(2)
    raw = _norm(flat, weights[f"{name}.norm.weight"]) @ weights[f"{name}.projection.weight"].T
    bias = weights[f"{name}.bias.weight"][:, 0]
    found = stream_weights_reference(raw.flatten(0, 1), bias, ROUNDS)
    a, b, c = (part.unflatten(0, x.shape[:2]) for part in found)
    f = branch(sum(a[..., j, None] * x[..., j, :] for j in range(n)))
    rows = [
        sum(b[..., i, j, None] * x[..., j, :] for j in range(n)) + c[..., i, None] * f
        for i in range(n)
    ]
    return torch.stack(rows, dim=2)


def reference_logits(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Compute (B, T, 256) logits from the last block's output, (B, T, D), or streams of it."""
    if x.dim() == 4:
        x = x.mean(dim=2)
    return _norm(x, weights["norm.weight"]) @ weights["head.weight"].T


def reference_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Average the cross-entropy in nats a byte."""
    of_target = logits.gather(-1, targets[..., None])[..., 0]
    return (torch.logsumexp(logits, dim=-1) - of_target).mean()


def _norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6) * weight


def _attention(qkv: Tensor, heads: int, window: int | None) -> Tensor:
    """Attend causally over (B, T, 3 D) projections, one after another q, k and v of all heads."""
    batch, length, width = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
    q, k = _norm(_turn(q)), _norm(_turn(k))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    place = torch.arange(length, device=qkv.device)
    distance = place[:, None] - place
    unseen = (distance < 0) | (distance >= (window or length))
    y = torch.softmax(scores.masked_fill(unseen, -math.inf), dim=-1) @ v
    return y.transpose(1, 2).reshape(batch, length, width // 3)


def _turn(x: Tensor) -> Tensor:
    """Turn every pair (i, i + d / 2) of (..., T, d) by position * 10000**(-2 i / d)."""
    real, imaginary = x.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * torch.exp(1j * rotary_angles(*x.shape[-2:], x.device))
    return torch.cat([turned.real, turned.imag], dim=-1)


def rotary_angles(length: int, head_dim: int, device: torch.device) -> Tensor:
    """Compute (length, head_dim / 2) float64 angles."""
    pair = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    position = torch.arange(length, dtype=torch.float64, device=device)
    return position[:, None] * 10000.0 ** (-2 * pair / head_dim)


def state_values(tensor: TernaryTensor) -> dict[str, Tensor]:
    """Read what a packed tensor stores, as float64 numbers.

    Returns:
        z = T P + A, v = 128 E + F, the moment m in root-mean-squares of the direction, and the
        running mean squares of rows and columns, 0 where there is none yet.
    """
    rule, slow = tensor.rule, tensor.num_weights > SLOW_WEIGHTS
    unpack = unpack_trits_torch if slow else unpack_trits_reference
    trits = unpack(tensor.trits, tensor.in_features).double()
    low = tensor.remainder.double()
    moment = getattr(tensor, "moment", torch.zeros_like(low)).double()
    share_a_byte = bool(rule.moment_range) and not hasattr(tensor, "moment")
    if share_a_byte:
        moment = torch.floor(low / 16)
        low = low - 16 * moment
        low = torch.where(low > 7, low - 16, low)
    largest = 7 if share_a_byte else 127
    values = {
        "z": trits * rule.radix + low,
        "v": tensor.exponent.double() * 128 + tensor.fraction.double(),
        "m": moment * rule.moment_range / largest,
    }
    if hasattr(tensor, "row_statistic"):
        values["rows"] = statistic_value_reference(tensor.row_statistic)
        values["columns"] = statistic_value_reference(tensor.column_statistic)
    return values


def reference_direction(grad: Tensor, direction: str, before: dict[str, Tensor]) -> Tensor:
    """Compute the direction of a step, of unit root-mean-square, in float64."""
    grad = grad.double()
    if direction == "sign":
        u = grad.sign()
    elif direction == "factored":
        rows = _running_mean(before["rows"], grad.square().mean(dim=1))
        columns = _running_mean(before["columns"], grad.square().mean(dim=0))
        u = grad / torch.sqrt(rows[:, None] * columns / rows.mean())
    else:
        u = _near_polar(grad) if grad.device.type == "cpu" else _newton_schulz(grad)
        length = u.norm(dim=1, keepdim=True)
        u = torch.where(length > 0, u / length, 0)
    return u / _rms(u)


def _newton_schulz(grad: Tensor) -> Tensor:
    u = grad / grad.norm()
    for _ in range(5):
        gram = u @ u.T
        u = 3.4445 * u + (-4.7750 * gram + 2.0315 * gram @ gram) @ u
    return u


def _near_polar(grad: Tensor) -> Tensor:
    """Apply the rational function that a CPU has for it to the singular values themselves."""
    left, s, right = torch.linalg.svd(grad, full_matrices=False)
    s = s / (s**4).sum() ** 0.25
    factor = 0.961939909 + 0.00921883 / (s**2 + 1.8960818e-5)
    return left * (s * (factor + 0.18527752 / (s**2 + 9.18605963e-3))) @ right


def _running_mean(before: Tensor, value: Tensor) -> Tensor:
    return torch.where(before == 0, value, 0.99 * before + 0.01 * value)


def reference_slope(grad: Tensor, weight: Tensor, group_size: int) -> Tensor:
    """Sum g * w over each group, then divide by the root-mean-square, in float64."""
    products = grad.double() * weight
    slope = torch.stack([part.sum(dim=1) for part in products.split(group_size, dim=1)], dim=1)
    return slope / _rms(slope)


def reference_step(
    tensor: TernaryTensor,
    before: dict[str, Tensor],
    stored_moment: Tensor,
    direction: Tensor,
    slope: Tensor,
    lr: float,
    micro: int = 0,
    accumulation: int = 1,
) -> dict[str, Tensor]:
    """Compute where one micro-batch ought to bring the state of a tensor, but for its rounding.

    Args:
        tensor: says which rule.
        before: what `state_values` said before.
        stored_moment: what it says afterwards; the weights step by the moment as it is stored.
        direction: (N, K), of unit root-mean-square.
        slope: (N, groups), of unit root-mean-square.
        lr: learning rate of the step.
        micro: number of the micro-batch in the step.
        accumulation: micro-batches of the step.
    """
    rule, largest = tensor.rule, tensor.rule.radix + tensor.rule.remainder_max
    size, z, m = lr * rule.radix / 16, before["z"], before["m"]
    v = before["v"] - 4 * lr / accumulation * slope.clamp(-3, 3)
    if not rule.moment_range:
        z = z - size / accumulation * direction.clamp(-4, 4)
    else:
        m = (0.9 if micro == 0 else 1.0) * m + 0.1 / accumulation * direction.clamp(-32, 32)
        if micro == accumulation - 1:
            z = z - size * (stored_moment / _rms(stored_moment)).clamp(-4, 4)
    return {
        "z": z.clamp(-largest, largest),
        "v": v.clamp(-96 * 128, 31 * 128 + 127),
        "m": m.clamp(-rule.moment_range, rule.moment_range),
    }


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
