"""The capacity model against queues whose delay is known exactly, and against itself where only order is known."""

import math

import numpy as np
import pytest
from stats import assert_mean
from table import TableLM, random_table

import smcdecode as smc
from smcdecode.infer.forecast import Curve, Forecast, PassTimes
from smcdecode.planner.capacity import Kind, Machine, simulate
from smcdecode.planner.recording import record

ONE = [Kind(prompt=0, tokens=1)]


def machine(samples, lanes=1, reading=0.0, per_cycle=1.0):
    return Machine({1: samples}, reading, per_cycle, lanes)


def mean_waits(runs, one, mix=ONE, **options):
    return np.array([simulate(one, mix, seed=seed, **options).waits.mean() for seed in range(runs)])


EXPONENTIAL = tuple(-np.log1p(-(np.arange(4000) + 0.5) / 4000))  # its quantiles


@pytest.mark.parametrize("samples", [(1.0,), (0.2, 0.4, 2.4), EXPONENTIAL], ids=["M/D/1", "M/G/1", "M/M/1"])
def test_one_lane_and_one_cycle_is_the_queue_of_pollaczek_and_khinchine(samples):
    mean, square, load = np.mean(samples), np.mean(np.square(samples)), 0.6
    waits = mean_waits(40, machine(samples), machines=1, rate=load / mean, requests=6000)
    assert_mean(waits, load / mean * square / (2 * (1 - load)))


def erlang_c(c, load):
    """The mean wait, in services, of M/M/c."""
    a = c * load
    last = a**c / math.factorial(c) / (1 - load)
    waiting = last / (sum(a**k / math.factorial(k) for k in range(c)) + last)
    return waiting / (c * (1 - load))


def test_one_line_before_many_machines_is_the_queue_of_erlang():
    c, load = 5, 0.8
    mean = float(np.mean(EXPONENTIAL))
    waits = mean_waits(40, machine(EXPONENTIAL), machines=c, rate=c * load / mean, requests=6000, line="one")
    assert_mean(waits, mean * erlang_c(c, load))


def test_random_places_are_queues_of_their_own():
    load = 0.6
    waits = mean_waits(40, machine((1.0,)), machines=4, rate=4 * load, requests=8000, line="random")
    assert_mean(waits, load / (2 * (1 - load)))


def test_a_wrong_formula_would_be_noticed():
    waits = mean_waits(40, machine((1.0,)), machines=1, rate=0.6, requests=6000)
    with pytest.raises(AssertionError):
        assert_mean(waits, 0.6 / (1 - 0.6))  # that of exponential services


def test_no_load_no_wait_and_each_answer_takes_its_cycles():
    mix = [Kind(prompt=100, tokens=10), Kind(prompt=10, tokens=3, weight=2.0)]
    one = Machine({1: (0.5,), 4: (0.8,)}, reading=0.01, tokens_per_cycle=2.5, lanes=4)
    found = simulate(one, mix, machines=1000, rate=1e-3, requests=400)
    assert found.waits.max() == 0
    assert {round(x, 9) for x in found.totals} == {1.0 + 4 * 0.5, 0.1 + 2 * 0.5}


def test_seconds_are_linear_between_the_numbers_of_requests_that_were_recorded():
    one = Machine({2: (1.0, 3.0), 4: (2.0, 5.0)}, 0.0, 1.0, 4)
    assert [one.seconds(g, 0.1) for g in (1, 2, 3, 4, 9)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert [one.seconds(g, 0.9) for g in (1, 2, 3, 4, 9)] == [3.0, 3.0, 4.0, 5.0, 5.0]


def test_below_its_capacity_a_machine_keeps_up_and_above_it_does_not():
    mix = [Kind(prompt=50, tokens=20), Kind(prompt=5, tokens=40)]
    one = Machine({1: (0.1,), 8: (0.3,)}, reading=1e-3, tokens_per_cycle=3.0, lanes=8)
    most = one.answers_per_second(mix)
    calm, full = (simulate(one, mix, machines=1, rate=share * most, requests=6000) for share in (0.9, 1.1))
    assert calm.waits[-500:].mean() < 5
    assert full.waits[-500:].mean() > 3 * full.waits[:500].mean()
    assert one.tokens_per_second(mix) == pytest.approx(30 * most)
    assert one.cost(mix, price=36.0, load=0.5) == pytest.approx(0.01 / (15 * most) * 1e6)


def test_a_thousand_machines_wait_less_than_one_at_the_same_load():
    one = machine((1.0,), lanes=2)
    waits = [simulate(one, ONE, machines=m, rate=1.6 * m, requests=20000).waits.mean() for m in (1, 30, 1000)]
    assert waits == sorted(waits, reverse=True) and waits[-1] < waits[0] / 2


def test_the_machine_of_a_plan():
    flat = lambda seconds: Curve((1.0,), (seconds,))  # noqa: E731
    times = PassTimes(Curve((1.0, 10.0), (1.0, 10.0)), flat(0.1), flat(0.01), flat(0.0), flat(0.02), flat(0.5), 3.0)
    chosen = Forecast(2, 4, 0.2, 1.0, 1.0, 3.7, 1.0, 0.0)
    one = Machine.planned(times, chosen, lanes=3, prompt=60)
    assert one.reading == 0.05 and one.tokens_per_cycle == 3.7
    assert one.seconds(3) == pytest.approx(30 + 0.02 + 0.5 + 4 * 0.11)  # 3 requests of 2 particles and 5 positions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: machine(()), "seconds of at least one cycle"),
        (lambda: machine((1.0,), lanes=0), "lanes ≥ 1"),
        (lambda: simulate(machine((1.0,)), [], machines=1, rate=1.0), "a mix is"),
        (lambda: simulate(machine((1.0,)), ONE, machines=0, rate=1.0), "machines and requests"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make, message):
    with pytest.raises(smc.InvalidOption, match=message):
        make()


def test_a_machine_is_recorded_from_the_real_engine():
    p, q = (TableLM(random_table(seed, 9, floor=0.3), name=name) for seed, name in ((1, "p"), (2, "q")))
    method = smc.SMC(smc.Draft(q, block=3, strictness=0.0), particles=2)
    one = record(p, method, [[2, 3], [4, 5, 6]], lanes=5, max_tokens=13, memory=1 << 24)
    assert set(one.cycles) == {1, 2, 4, 5} and one.lanes == 5
    assert all(len(seconds) == 5 and min(seconds) > 0 for seconds in one.cycles.values()), "the last one adds nothing"
    assert one.tokens_per_cycle == pytest.approx(13 / 5) and one.reading > 0
    with pytest.raises(smc.InvalidOption, match="a prompt and lanes ≥ 1"):
        record(p, method, [], lanes=5)
