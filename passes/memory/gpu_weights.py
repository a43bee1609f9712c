"""The weights that convolutions of gradients read, as XLA's GPU compiler lays them out.

The gradient of a convolution's images is a convolution with the same weights, reversed and read the other way round.
Where it goes back over a window or a stride, the library's kernel for it reads the weights of the forward pass as they
lie. With a window of one element and no stride there is nothing to reverse: XLA has an ordinary convolution. This wants
other weights than the forward pass, and converts them again, from the weights themselves. The kernel that does so is
one with the kernel that updates them (passes/memory/gpu_tasks.py): such a gradient waits for that of the weights.

Reference: MatchBackwardInput of xla/service/gpu/transforms/conv_rewriter.cc and conv_kind_assignment.cc, and what
`xla_dump_to` has of Wide-ResNet on eight H100 and A100: `input_convert_transpose_fusion`, as of jaxlib 0.10.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from passes.memory.operations import Operation

AGAIN = "weights once more"
"""The name of what converts weights for the gradient of a convolution's images."""


def laid_out(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with reversed weights of convolutions as other views, or as conversions of their own."""
    changed = list(operations)
    read = Counter(o for operation in operations for o in operation.operands)
    for operation in operations:
        if operation.name != "convolution":
            continue
        images, weights = operation.operands
        turned = operations[weights]
        reverse = turned.operands[0] if turned.kind == "transpose" else weights
        if operations[reverse].name != "reverse" or read[reverse] > 1 or read[weights] > 1:
            continue
        changed[reverse] = operations[reverse]._replace(kind="bitcast")
        source = _converted(operations, reverse)
        if source >= 0 and _is_of_points(operation, operations[images], turned):
            changed[weights] = turned._replace(kind="rearrange", operands=(source,), tag=(AGAIN, turned.tag))
    return changed


def _converted(operations: Sequence[Operation], reverse: int) -> int:
    """The argument that is converted and reversed, -1 for anything else."""
    (source,) = operations[reverse].operands
    if not operations[source].is_conversion:
        return -1
    while operations[source].is_conversion:
        (source,) = operations[source].operands
    return source if operations[source].kind == "input" else -1


def _is_of_points(convolution: Operation, images: Operation, weights: Operation) -> bool:
    """Whether a convolution makes each point of its result of the same point of the images."""
    window = weights.shape[:-2]
    return all(size == 1 for size in window) and convolution.shape[1:-1] == images.shape[1:-1]
