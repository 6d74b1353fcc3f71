import pytest

from rlmix.sandbox.shell import ends_with_submit


@pytest.mark.parametrize(
    "command",
    ["submit", "  submit \n", "true && submit", "true; submit;", "(cd x; submit)", "a\nsubmit"],
)
def test_submit_as_the_last_word_counts(command: str) -> None:
    assert ends_with_submit(command)


@pytest.mark.parametrize(
    "command", ["submit; ls", "submit | cat", "resubmit", "submit.sh", "./submit", "echo 'submit'"]
)
def test_submit_elsewhere_does_not_count(command: str) -> None:
    assert not ends_with_submit(command)
