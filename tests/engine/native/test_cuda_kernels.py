"""The kernels of decoding attention equal attention over the pages, gathered.

They run on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

if not find_spec("triton") or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET")):
    pytest.skip("no GPU, and no Triton with TRITON_INTERPRET=1", allow_module_level=True)

from burnish.engine.native import cuda_kernels
from burnish.engine.native.cuda_kernels import GROUP, PageTable

# The interpreter converts arrays of one element to numbers, and subtracts infinite maxima.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, PAGES = 16, 40
COUNTS = [1, 16, 17, 70, 130, 0]
CLOSE = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
HEADS = [(9, 3, 64), (4, 4, 32), (12, 2, 128)]


def assert_gathered(
    got: Tensor, q: Tensor, pools: Tensor, pages: list[Tensor], counts: list[int], atol: float
) -> None:
    """Rows equal attention to the gathered tokens of their pages; empty rows are 0."""
    for row, (mine, count) in enumerate(zip(pages, counts, strict=True)):
        slots = (mine[:, None] * SIZE + torch.arange(SIZE)).flatten()[:count]
        k, v = (x[slots].double().transpose(0, 1) for x in pools)
        query = q[row].double().view(len(k), -1, q.shape[2])
        weights = torch.softmax(query @ k.transpose(1, 2) / q.shape[2] ** 0.5, 2)
        want = (weights @ v).flatten(0, 1)
        torch.testing.assert_close(got[row].cpu().double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), CLOSE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
@pytest.mark.parametrize("programs", [1, 64])
def test_equals_gathered(
    programs: int,
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    atol: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one part for each row, and in several."""
    monkeypatch.setattr(cuda_kernels, "PROGRAMS", programs)
    torch.manual_seed(0)
    q = torch.randn(len(COUNTS), heads, width, dtype=dtype)
    pools = torch.randn(2, PAGES * SIZE, kv_heads, width, dtype=dtype)
    pages = [torch.randperm(PAGES)[: -(-count // SIZE)] for count in COUNTS]
    first = torch.tensor([0, *map(len, pages)]).cumsum(0)[:-1]
    table = torch.cat(pages), first, torch.tensor(COUNTS), torch.zeros(len(COUNTS)).long()
    given = q.to(DEVICE), *pools.to(DEVICE), PageTable(*(x.to(DEVICE) for x in table))
    got = cuda_kernels.attend(*given, SIZE)
    assert not got[-1].any()  # it sees nothing
    assert_gathered(got, q, pools, pages, COUNTS, atol)


@pytest.mark.parametrize(("dtype", "atol"), CLOSE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
@pytest.mark.parametrize("programs", [1, 200])
def test_shared_pages_are_read_once(
    programs: int,
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    atol: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows 0, 2 and 3 share 5 pages, rows 1 and 4 share 1, and row 5 shares none."""
    monkeypatch.setattr(cuda_kernels, "PROGRAMS", programs)
    torch.manual_seed(0)
    shared, counts = {0: [0, 2, 3], 1: [1, 4]}, [81, 20, 100, 82, 150, 33, 0, 0]
    lengths = {0: 5, 1: 1}
    q = torch.randn(len(counts), heads, width, dtype=dtype)
    pools = torch.randn(2, PAGES * SIZE, kv_heads, width, dtype=dtype)
    pages = [torch.randperm(PAGES)[: -(-count // SIZE)] for count in counts]
    owns = torch.zeros(len(counts), dtype=torch.long)
    for number, rows in shared.items():
        for row in rows:
            pages[row][: lengths[number]] = pages[rows[0]][: lengths[number]]
            owns[row] = lengths[number] * SIZE
    first = torch.tensor([0, *map(len, pages)]).cumsum(0)[:-1]
    items = torch.zeros(4, 2 + GROUP, dtype=torch.long)
    for number, rows in shared.items():
        padding = [-1] * (GROUP - len(rows))
        items[number] = torch.tensor(
            [first[rows[0]], lengths[number] * SIZE, *rows, *padding], dtype=torch.long
        )
    table = torch.cat(pages), first, torch.tensor(counts), owns, items
    given = q.to(DEVICE), *pools.to(DEVICE), PageTable(*(x.to(DEVICE) for x in table))
    got = cuda_kernels.attend(*given, SIZE)
    assert not got[-2:].any()  # they see nothing
    assert_gathered(got, q, pools, pages, counts, atol)


@pytest.mark.parametrize("programs", [1, 64])
def test_nan_in_the_cache_reaches_the_result(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine notices overflows by NaN; a finite result without these tokens would hide them."""
    monkeypatch.setattr(cuda_kernels, "PROGRAMS", programs)
    torch.manual_seed(0)
    q, pools = torch.randn(2, 4, 32), torch.randn(2, PAGES * SIZE, 4, 32)
    pools[:, 100] = float("nan")  # page 6
    pages = [torch.arange(0, 12), torch.arange(12, 24)]
    first, counts = torch.tensor([0, 12]), torch.tensor([190, 190])
    table = PageTable(torch.cat(pages), first, counts, torch.zeros(2).long())
    given = q.to(DEVICE), *pools.to(DEVICE), PageTable(*(x.to(DEVICE) for x in table[:4]))
    got = cuda_kernels.attend(*given, SIZE)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


def test_an_ended_row_of_a_group_sees_nothing() -> None:
    torch.manual_seed(0)
    q, pools = torch.randn(2, 4, 16), torch.randn(2, PAGES * SIZE, 2, 16)
    pages = [torch.tensor([3, 7]), torch.tensor([3, 9])]
    items = torch.tensor([[0, SIZE, 0, 1, *[-1] * (GROUP - 2)]])
    table = torch.cat(pages), torch.tensor([0, 2]), torch.tensor([20, 0]), torch.tensor([SIZE] * 2)
    given = q.to(DEVICE), *pools.to(DEVICE), PageTable(*(x.to(DEVICE) for x in (*table, items)))
    got = cuda_kernels.attend(*given, SIZE)
    assert got.isfinite().all()
    assert_gathered(got[:1], q[:1], pools, pages[:1], [20], 1e-5)
