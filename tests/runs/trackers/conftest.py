import pytest


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """No tracker contacts a server, and all of them write into the test's directory."""
    set_to = {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
    }
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # MLflow's artifacts
