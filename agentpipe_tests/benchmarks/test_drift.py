import pytest

from agentpipe_tests.benchmarks.test_smoke import smoke
from benchmarks import report


@pytest.mark.slow
def test_a_smoke_run_leaves_results_that_the_page_can_show(tmp_path):
    content = smoke("drift", tmp_path)
    assert [figure["cores"] for figure in content["figures"]] == [1] * 5
    page = report.results(tmp_path)
    assert "| agentpipe, KL by row | 20,000 | 1 |" in page
    assert all(figure["name"] in page for figure in content["figures"])
