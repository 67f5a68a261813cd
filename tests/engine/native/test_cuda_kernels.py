"""The GPU's decoding kernel equals attention over the pages, gathered."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("the kernel runs on a GPU", allow_module_level=True)

from burnish.engine.native import cuda_kernels

SIZE, PAGES = 16, 40
COUNTS = [1, 16, 17, 70, 130, 0]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 32), (12, 2, 128)])
def test_equals_gathered(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, atol: float
) -> None:
    torch.manual_seed(0)
    q = torch.randn(len(COUNTS), heads, width, dtype=dtype)
    keys, values = torch.randn(2, PAGES * SIZE, kv_heads, width, dtype=dtype)
    pages = [torch.randperm(PAGES)[: -(-count // SIZE)] for count in COUNTS]
    first = torch.tensor([0, *map(len, pages)]).cumsum(0)[:-1]
    table = [x.cuda() for x in (torch.cat(pages), first, torch.tensor(COUNTS))]
    got = cuda_kernels.attend(q.cuda(), keys.cuda(), values.cuda(), table, SIZE).cpu().double()
    assert not got[-1].any()  # it sees nothing
    for row, (mine, count) in enumerate(zip(pages[:-1], COUNTS, strict=False)):
        slots = (mine[:, None] * SIZE + torch.arange(SIZE)).flatten()[:count]
        k, v = (x[slots].double().transpose(0, 1) for x in (keys, values))
        query = q[row].double().view(kv_heads, -1, width)
        weights = torch.softmax(query @ k.transpose(1, 2) / width**0.5, 2)
        torch.testing.assert_close(got[row], (weights @ v).flatten(0, 1), rtol=0, atol=atol)


def test_writes_to_its_slots_alone() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 64, 3, 16).cuda()
    new, slots = torch.randn(2, 6, 3, 16).cuda(), torch.tensor([7, 0, 63, 16, 8, -1]).cuda()
    want = [pool.clone() for pool in (keys, values)]
    for pool, x in zip(want, new, strict=True):
        pool[slots[:-1]] = x[:-1]
    cuda_kernels.write_pages(keys, values, slots, *new.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(keys, want[0])
    assert torch.equal(values, want[1])
