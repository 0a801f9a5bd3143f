"""Pipelines to time: equal stages, and any stages as a hypothesis strategy."""

from hypothesis import strategies as st

from hetplan.plan.timing import Durations

SECONDS = st.one_of(st.just(0.0), st.floats(0.001, 4.0))


def equal(num_stages, forward=1.0, backward=2.0, weight=1.0, p2p=0.0):
    return Durations(
        forward_s=(forward,) * num_stages,
        backward_s=(backward,) * num_stages,
        weight_s=(weight,) * num_stages,
        p2p_s=(p2p,) * (num_stages - 1),
    )


@st.composite
def pipelines(draw, schedules=("gpipe", "1f1b", "interleaved", "zero-bubble"), most_pp=6):
    schedule = draw(st.sampled_from(schedules))
    pp = draw(st.integers(1, most_pp))
    vpp = draw(st.integers(1, 3)) if schedule == "interleaved" else 1
    m = pp * draw(st.integers(1, 3)) if schedule == "interleaved" else draw(st.integers(1, 14))
    n = pp * vpp
    forward, backward = draw(st.lists(SECONDS, min_size=n, max_size=n)), draw(st.lists(SECONDS, min_size=n, max_size=n))
    share = draw(st.floats(0, 1))
    p2p = draw(st.lists(SECONDS, min_size=n - 1, max_size=n - 1))
    durations = Durations(
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        weight_s=tuple(b * share for b in backward),
        p2p_s=tuple(p2p),
    )
    return schedule, pp, m, vpp, durations
