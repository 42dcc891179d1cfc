from hypothesis import given
from hypothesis import strategies as st

from slimectl.data.hashing import sample_seed


def test_seed_is_the_same_in_every_process():
    # int(hashlib.blake2b(b"42\x003\x001+1=", digest_size=8).hexdigest(), 16) >> 1
    assert sample_seed(42, "1+1=", 3) == 2947111427746535192


def test_each_of_the_three_matters():
    seeds = {sample_seed(r, p, i) for r in range(4) for p in ("", "1", "1\0") for i in range(4)}
    assert len(seeds) == 48


@given(st.integers(), st.text(), st.integers(0))
def test_seed_fits_63_bits(run_seed, prompt, index):
    assert 0 <= sample_seed(run_seed, prompt, index) < 2**63


def test_broken_surrogates_in_a_prompt_are_no_error():
    assert sample_seed(0, "\ud800", 0) != sample_seed(0, "", 0)
