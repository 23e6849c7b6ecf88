"""What passes hold by an estimate: on one device, over micro-batches, and on a rank of several."""

import pytest
import torch
from estimated_models import ROWS, nbytes
from torch import nn

from torch_bf16.tools.estimate import activations as passes
from torch_bf16.tools.estimate.activations import Activations, batch_argument
from torch_bf16.tools.estimate.live import LiveBytes
from torch_bf16.tools.estimate.precisions import precisions

META = torch.device("meta")
LAYERS, ROW = 6, 128


def deep():
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(ROW, ROW, bias=False), nn.Tanh()) for _ in range(LAYERS))
    )


def measured(rows):
    return Activations(deep().to(META), batch_argument(f"{rows}x{ROW}"), META)


def test_gradients_of_an_earlier_pass_leave_no_room_for_activations():
    precision, model, batch, peaks = ROWS["32-true"], deep(), torch.randn(64, ROW), []
    with LiveBytes() as live:
        for _ in range(3):
            live.peak = live.now
            model(batch).mean().backward()
            peaks.append(live.peak)
    gradients = nbytes(p.grad for p in model.parameters())
    for several, peak in ((False, peaks[0]), (True, peaks[2])):
        found = gradients + measured(64).alone(precision, gradients, several)
        # From a second pass on, each gradient is there twice as it is added.
        assert found == pytest.approx(peak, rel=0.03)
    assert peaks[2] > 1.2 * peaks[0]


@pytest.mark.parametrize("label", ["32-true", "bf16-mixed", "bf16-stochastic"])
def test_a_rank_holds_all_activations_beside_its_parts_of_gradients(label):
    precision, found = ROWS[label], measured(512)
    size = 4 if label == "32-true" else 2
    kept, whole = LAYERS * 512 * ROW * size, LAYERS * ROW**2 * precision.dtype.itemsize
    # Some outputs and one gradient are there before the first of the outputs can go.
    for ranks in (2, 100):
        peak = found.on_rank(precision, whole // ranks, False, ranks) + whole // ranks
        assert kept < peak < 1.7 * kept
    assert kept < found.on_rank(precision, whole // 2, True, 2) < 1.7 * kept


class Attributes(nn.Module):
    """A tensor that is a mere attribute, and a list of weights, as that of an LSTM."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.shift = nn.LSTM(ROW, ROW), torch.ones(ROW)

    def forward(self, x):
        return self.recurrent(x + self.shift)[0]


class Classifier(nn.Module):
    """Has one label for each row, where a language model has one for each token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, ROW)

    def forward(self, input_ids, labels=None):
        scores = self.embedding(input_ids).sum(1)
        loss = None if labels is None else nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "scores": scores} if labels is not None else scores


@pytest.mark.parametrize(
    ("kind", "batch"),
    [(Attributes, f"5x2x{ROW}"), (Classifier, "4x8")],
    ids=["attributes", "labels"],
)
def test_a_step_needs_neither_registered_tensors_nor_a_label_for_each_token(kind, batch):
    with META:
        model = kind()
    for device in (META, torch.device("cpu")):
        found = Activations(model, batch_argument(batch), device)
        assert found.alone(ROWS["32-true"], 0, False) > 4 * sum(
            p.numel() for p in model.parameters()
        )


def test_what_a_trace_cannot_do_is_not_logged_beside_the_error(caplog):
    class Mixed(nn.Linear):
        def forward(self, x):
            return torch.ops.aten._grouped_mm(x, self.weight[None])

    with pytest.raises(ValueError, match="took no step"):
        Activations(Mixed(8, 8).to(META), batch_argument("8x8"), META).alone(
            ROWS["32-true"], 0, False
        )
    assert not caplog.records


def test_a_shape_that_does_not_fit_is_not_taken_for_missing_tokens():
    with pytest.raises(ValueError, match="took no step over") as caught:
        Activations(deep().to(META), batch_argument("8x7"), META).alone(ROWS["32-true"], 0, False)
    assert "int64" not in str(caught.value)


@pytest.mark.parametrize(("ranked", "count"), [(False, 5), (True, 10)])
def test_passes_that_do_not_differ_are_measured_once(ranked, count, monkeypatch):
    calls = []
    monkeypatch.setattr(passes, "peak_of_pass", lambda *given: calls.append(given) or 0)
    found = measured(1)
    for precision in precisions():
        found.alone(precision, 0, False)
        if ranked:
            found.on_rank(precision, 0, False, 2)
    assert len(calls) == count
