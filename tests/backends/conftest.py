import pytest

from torch_bf16 import backends
from torch_bf16.backends.certificates import certificate


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No verdicts of other tests, on disk or in memory, and no warning given yet."""
    monkeypatch.setenv("TORCH_BF16_CACHE", str(tmp_path))
    monkeypatch.setattr(certificate, "_known", {})
    backends._warn_of.cache_clear()
    backends._automatic.cache_clear()
    yield tmp_path
    backends._warn_of.cache_clear()
    backends._automatic.cache_clear()
