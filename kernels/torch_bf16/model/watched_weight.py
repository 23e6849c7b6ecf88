"""A bf16 weight that is compared with what it was some steps before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torch_bf16.backends import cuda_graphs
from torch_bf16.errors import warn
from torch_bf16.memory import place_and_version

from .stochastic_writes import looks_stochastic

__all__ = ["WatchedWeight", "bits_of", "has_address", "is_comparable", "is_plain", "is_readable"]

_COMPARED_ELEMENTS = 4096
# If updates are lost, most numbers stay, and the others move by a few bf16 spacings, by more near
# zero. A memory bank or a pruning mask replaces numbers by unrelated ones.
_LOSSY_WRITES, _SMALL_MOVE = 2, 16
_AVERAGE = "torch_bf16.EMA(model, decay) is such an average"

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

_Kind = Literal["in the model", "in a model of its own", "copy", "loose"]


@dataclass(eq=False)
class WatchedWeight:
    """A bf16 weight that no optimizer trains.

    Attributes:
        name: its name in the model that was cast, or of the weight there that it follows.
        kind: whether it is in the model that is trained, in one that was cast apart from it, such
            as a reference model, a ``copy.deepcopy`` of a part of it, or in no module.
        get: returns the weight, or None if it is gone.
        place: its address and version when it was first looked at.
        bits: the bits of its first elements then, or when they were last compared.
        followed: returns the weight that it copied; None if that is not known, or gone.
        changed: how many of these elements the last write changed.
        lossy: how many writes changed only a few of them.
        is_harmless: whether it turned out to lose nothing.
        modules: the outermost modules of all weights that were written with it.
        model: the class of its model, if that is one of its own.
    """

    name: str
    kind: _Kind
    get: Callable[[], Tensor | None]
    place: tuple[int, int]
    bits: Tensor | None
    followed: Callable[[], Tensor | None] = lambda: None
    changed: int = 0
    lossy: int = 0
    is_harmless: bool = False
    modules: Sequence[str] = ()
    model: str = ""

    @property
    def module(self) -> str:
        """The outermost module that the weight is in."""
        return self.name.split(".")[0]

    @classmethod
    def of(
        cls,
        weight: Tensor,
        name: str,
        kind: _Kind,
        get: Callable[[], Tensor | None],
        followed: Callable[[], Tensor | None] = lambda: None,
    ) -> WatchedWeight:
        """Begin to watch a weight that is comparable."""
        bits = bits_of(weight) if is_readable(weight) else None
        return cls(name, kind, get, place_and_version(weight), bits, followed)

    @property
    def address(self) -> int | None:
        """Where the weight is now; None if it is gone."""
        weight = self.get()
        return None if weight is None else weight.data_ptr()

    def is_written(self) -> bool:
        """Whether it was written since it was first looked at."""
        weight = self.get()
        if weight is None or not is_readable(weight):
            return False
        # A write through weight.data changes neither its address nor its version.
        written = self.place != place_and_version(weight)
        return written or not (self.bits is None or torch.equal(self.bits, bits_of(weight)))

    def loses_writes(self, trained: Callable[[], Iterable[Tensor]]) -> bool:
        """Count a write that has changed only a few numbers: whether it is the second one.

        Args:
            trained: returns the weights that optimizers train.
        """
        weight = self.get()
        if weight is None or not is_readable(weight):
            return False
        before, self.bits = self.bits, bits_of(weight)
        if before is None or before.shape != self.bits.shape:
            return False
        moves = (self.bits.to(before.device).int() - before.int()).abs()
        moves = moves[moves > 0].cpu()
        self.changed = len(moves)
        # A write that does nothing leaves all of them.
        if not 0 < self.changed < before.numel() // 2 or moves.median() > _SMALL_MOVE:
            return False
        source = self.followed()
        if (
            source is not None
            and source.shape == weight.shape
            and is_readable(source)
            and looks_stochastic(before, self.bits, bits_of(source))
        ):
            return False
        self.is_harmless = any(_loses_nothing(weight, self.bits, each) for each in trained())
        self.lossy += not self.is_harmless
        return not self.is_harmless and self.lossy == _LOSSY_WRITES

    def warn(self) -> None:
        """Warn of what its writes lose."""
        if self.kind == "loose":
            what = f"a tensor outside of all modules follows {self.name!r} and is bfloat16, too"
            remedy = (
                "make the average before the model is cast, or of p.float(), or convert its "
                "tensors with float() once it is made; it then follows the bf16 weights in fp32. "
                f"{_AVERAGE}"
            )
        elif self.kind == "copy":
            what = f"a copy of {self.name!r} is bfloat16, as in the cast model that it copied"
            remedy = (
                "make the copy before the model is cast, or call float() on it once it is made; "
                f"it then follows the bf16 weights in fp32. {_AVERAGE}"
            )
        elif self.kind == "in a model of its own":
            what = (
                f"{self.name!r} of a {self.model} of which no optimizer of torch_bf16 trains "
                "anything is bfloat16"
            )
            remedy = (
                f"call float() on that {self.model} once it is cast or prepared; it then follows "
                "the bf16 weights in fp32, and the model that is trained stays bf16, which "
                "keep_fp32 could not tell from it by names; or an optimizer that was converted, if "
                "it is to be trained"
            )
        else:
            what = f"{self.name!r} is bfloat16 and no optimizer of torch_bf16 trains it"
            patterns = [f"{each}*" for each in self.modules or [self.module]]
            remedy = (
                f"keep_fp32={patterns} keeps it in fp32, where blending with bf16 weights works; "
                "or an optimizer that was converted, if it is to be trained"
            )
        compared = 0 if self.bits is None else self.bits.numel()
        warn(
            f"{what}, and the program moves it between steps: of {compared} numbers the last write "
            f"has changed {self.changed}. It is rounded to nearest, so what moves a number by less "
            "than half a bf16 spacing (0.2 to 0.4 %) is lost, and an average or a target network "
            f"hardly moves. What works: {remedy}",
        )


def is_comparable(weight: Tensor) -> bool:
    """Whether it is a bf16 matrix in memory of its own.

    Numbers of vectors are often alike: all scales of a norm begin as 1.
    """
    return (
        weight.dtype == torch.bfloat16
        and is_plain(weight)
        and weight.dim() > 1
        and not weight.is_neg()
        and weight.data_ptr() != 0  # an empty one has none
        # Its memory may have been freed, as FSDP1 does; a view then still has an address.
        and weight.untyped_storage().nbytes() > 0
    )


def has_address(tensor: Tensor) -> bool:
    """Whether it is plain memory: sparse tensors and those of torch.func have no address."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and not _functorch.is_functorch_wrapped_tensor(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether it has an address with numbers behind it, and a version."""
    return has_address(tensor) and not (tensor.is_meta or tensor.is_inference() or tensor.is_nested)


def is_readable(weight: Tensor) -> bool:
    """Whether it is comparable now: under capture of a CUDA graph nothing may be read."""
    return is_comparable(weight) and not cuda_graphs.capturing([weight.device])


def bits_of(weight: Tensor, most: int = _COMPARED_ELEMENTS) -> Tensor:
    """int16, the bits of its first elements, ``most`` of them at most; a copy."""
    weight = weight.detach()
    if not weight.is_contiguous() and weight.ndim:
        # Flattening would copy all of it.
        weight = weight[: -(-most // max(weight[:1].numel(), 1))]
    return weight.reshape(-1)[:most].view(torch.int16).clone()


def _loses_nothing(weight: Tensor, bits: Tensor, trained: Tensor) -> bool:
    """Whether a weight is trained itself by now, or was made equal to one that is trained."""
    if weight is trained:
        return True
    if (trained.shape, trained.dtype) != (weight.shape, weight.dtype):
        return False
    # To compare a sharded weight, its ranks would have to talk to each other.
    if not is_comparable(trained):
        return True
    return torch.equal(bits_of(trained).to(bits.device), bits)
