"""One thread per test process: pytest-xdist already fills the cores, and threads of two processes
that compete for one core wait for each other at every operation, which is many times slower."""

import gc
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest
from constraints import pinned
from gpu_marks import asked_for, device_is_lost, hide_gpus
from interpreter_speed import patch_language_once
from packaging.version import Version
from ranks import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    """Host tests must not wander onto a GPU: before anything asks torch for one."""
    expression = config.getoption("markexpr")
    hide_gpus(expression, os.environ)
    if asked_for(expression) and not hasattr(config, "workerinput"):
        # A test that breaks the device must leave no verdict; compiled kernels are kept elsewhere.
        # Workers of pytest-xdist inherit the folder.
        folder = tempfile.TemporaryDirectory()
        os.environ["TORCH_BF16_CACHE"] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Hardly anything of what collecting imports is garbage: looking for it takes a quarter."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """What collecting has imported stays, 800,000 objects: looking through them for garbage takes
    0.7 s, and hosts, benchmarks and Python itself do so hundreds of times."""
    gc.collect()
    gc.freeze()
    # Searches of ours look through what a program has frozen. What other tests have left, and would
    # be collected if it were not frozen, is not to be found.
    gc.get_freeze_count = lambda: 0


_pools: list[Ranks] = []


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """Nor does a file look through what others before it have imported and compiled."""
    if "torch._dynamo" in sys.modules:
        # At its ninth model torch.compile gives up on a function that all models share.
        with warnings.catch_warnings():
            # On a GPU this imports Inductor, and torch.jit, which is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            sys.modules["torch._dynamo"].reset()
    gc.collect()
    gc.freeze()
    for pool in _pools:
        pool.close_if_crowded()


# What torch 2.7 says of what it cannot do, and newer ones can.
UNABLE = r"FSDP\+TP sharding does not support uneven sharding.*|Cannot use ReduceOp.AVG with Gloo"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """What an older torch than the pinned one cannot do, and says so, is not tested there."""
    try:
        return (yield)
    except Exception as error:
        import torch

        # On the pinned torch, or a newer one, such a refusal is a fault.
        if Version(torch.__version__) >= Version(pinned("torch")):
            raise
        found = re.escape(torch.__version__)
        said = rf".*(?:or newer, and this is|in torch) {found}(?:;|, newer ones do).*"
        if torch.__version__ < "2.8":
            said += f"|{UNABLE}"
        if unable := re.search(said, f"{error}"):
            pytest.skip(unable[0])
        raise


pytest_runtest_setup = pytest_runtest_call


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A worker that lost its GPU would fail all that it is given from then on, and quickly: so it
    ends once it has said how the test went, and pytest-xdist starts another."""
    done = yield
    on_worker = hasattr(item.config, "workerinput")
    if on_worker and item.get_closest_marker("gpu") and device_is_lost():
        os._exit(1)
    return done


@pytest.fixture(scope="session")
def interpreted():
    """``interpreted(function, *arguments)``: a call in a process where Triton interprets.

    Triton decides at its import whether it does, and other tests of this process compile.
    """
    import torch

    from torch_bf16.backends import explain

    if reason := explain(torch.device("cuda"))["triton"]:
        pytest.skip(reason)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, patch_language_once) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result(timeout=60)
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=120)


@pytest.fixture(scope="session")
def hollow_library(tmp_path_factory):
    """The devices of ``hollow_cuda.py``, for processes that a test starts."""
    import torch
    from hollow_cuda import build

    pytest.importorskip("triton", minversion="3.5", reason="the Triton backend needs triton")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch has a CUDA of its own, where tests of GPUs see what waits")
    if torch.__version__ < "2.13":
        pytest.skip("the device was not tried with CPU builds of torch before 2.13")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("needs a C++ compiler")
    return build(tmp_path_factory.mktemp("hollow"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """``ranks(4, function, *arguments)``: what a function returns on each of four gloo ranks."""
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    _pools.append(pool)
    yield pool
    pool.close()


@pytest.fixture
def one_rank():
    """The mesh of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _seeded():
    """A test sees the same random numbers alone, in any order and on any worker."""
    # Imported here, because torch reads the variable above when it is loaded.
    from seeds import seed

    seed(0)
