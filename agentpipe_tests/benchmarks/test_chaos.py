"""The page of what breaks."""

from benchmarks.chaos_report import section


def test_the_page_counts_what_was_lost_and_says_how_long_it_took():
    times = {"median": 0.016, "most": 0.049}
    counts = {"times": 20, "taken": 5642, "lost": 1, "twice": 2, "other": 3, "missed": 4}
    kinds = [{"kind": "triton", **counts, "degraded_s": times, "recovered_s": None}]
    success = [{"triton": False, "frozen": True, "orders": 200, "successes": 150}]
    page = section({"probe_every_s": 0.5, "stations": 3, "kinds": kinds, "success": success})
    assert "at 3 stations of simulated lines at once, a probe of each part every 0.5 s" in page
    assert "| Triton killed | 20 | 5,642 | 1 | 2 | 3 | 4 | 0.02 (0.05) | – |" in page
    assert "| away | one frozen | 200 | 75.0% | [68.6%, 80.5%] |" in page
