"""Credentials stay out of run directories; names that only look like them stay in."""

import pytest

from rlmix.observe.redact import Redactor, is_secret_name


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "token", "HF_TOKEN", "s3_secret_key", "apikey", "db_password"]
)
def test_credential_names_are_recognised(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_turn_tokens", "eos_token", "tokens", "monkey", "keyboard"])
def test_ordinary_names_are_left_alone(name: str) -> None:
    assert not is_secret_name(name)


def test_assignments_to_secret_keys_are_blanked_and_others_kept() -> None:
    text = (
        "net:\n  token: abc\n  bind: 127.0.0.1\nsession:\n  max_turn_tokens: 64\n  password: null"
    )
    assert Redactor({}).assignments(text) == (
        "net:\n  token: ***\n  bind: 127.0.0.1\nsession:\n  max_turn_tokens: 64\n  password: null"
    )


def test_override_with_a_prefix_is_blanked() -> None:
    assert Redactor({}).assignments("++net.token=abc") == "++net.token=***"


def test_value_of_a_secret_variable_is_found_anywhere() -> None:
    redactor = Redactor({"A_TOKEN": "12345678", "B_TOKEN": "1234567890", "SHORT_TOKEN": "abc"})
    assert redactor.text("x=1234567890 y=12345678 z=abc") == "x=*** y=*** z=abc"


def test_a_key_of_any_service_is_a_secret_as_a_variable_and_no_key_of_a_configuration() -> None:
    """`sglang.api_key_env` may name any variable; `numerics_key` is a key, too."""
    for name in ("SGLANG_ADMIN_KEY", "MY_GATEWAY_KEY", "GITHUB_PAT", "AZURE_CONNECTION_STRING"):
        assert Redactor({name: "canary-1234"}).text("said canary-1234") == "said ***"
    for name in ("KEYBOARD", "SSH_KEY_PATH", "PATH", "MONKEY", "COMPAT"):
        assert Redactor({name: "canary-1234"}).text("said canary-1234") == "said canary-1234"
    assert Redactor({}).assignments("numerics_key: h100") == "numerics_key: h100"
