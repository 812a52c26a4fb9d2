"""TrainJobProgress against a server of Kubeflow Trainer's kind, and the TrainJob's files against Kubeflow's models."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.demos.boring_classes import BoringModel

from dlo_plugins.engines.kubeflow import TrainJobProgress
from support.trainers import quiet_trainer

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/dlo-1/status"
#: Fields of a status, and their types, in KEP-2779.
FIELDS = {"lastUpdatedTime": str, "progressPercentage": int, "estimatedRemainingSeconds": int, "metrics": list}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Server with a certificate and a token; returns the statuses that it has got."""
    statuses: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            known = self.headers["Authorization"] == "Bearer secret" and self.path == PATH
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if known:
                statuses.append(json.loads(body)["trainerStatus"])
            self.send_response(200 if known else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    key, certificate, token = tmp_path / "key.pem", tmp_path / "ca.crt", tmp_path / "token"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    token.write_text("secret\n")
    one = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    one.socket = context.wrap_socket(one.socket, server_side=True)
    threading.Thread(target=one.serve_forever, daemon=True).start()
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"https://localhost:{one.server_port}{PATH}")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(token))
    yield statuses
    one.shutdown()
    one.server_close()


class Logs(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("train_loss", float(batch_idx))
        return super().training_step(batch, batch_idx)


def train(every: float = 1e-9) -> None:
    trainer = quiet_trainer(
        max_epochs=2, limit_train_batches=4, limit_val_batches=0, callbacks=[TrainJobProgress(every)]
    )
    trainer.fit(Logs())


def test_progress_goes_to_the_controller_until_the_end(server):
    train()
    assert len(server) >= 3
    for status in server:
        assert {name: type(value) for name, value in status.items()} == {name: FIELDS[name] for name in status}
    assert [status["progressPercentage"] for status in server] == sorted(s["progressPercentage"] for s in server)
    assert (server[0]["progressPercentage"], server[-1]["progressPercentage"]) == (0, 100)
    assert server[-1]["estimatedRemainingSeconds"] == 0
    named = {metric["name"]: metric["value"] for metric in server[-1]["metrics"]}
    assert named == {"train_loss": "3", "epoch": "2", "step": "8"}
    assert all(status["lastUpdatedTime"].endswith("Z") for status in server)
    server.clear()
    train(every=3600.0)
    assert len(server) == 2


def test_a_controller_that_refuses_is_one_warning_and_elsewhere_nothing_is_sent(server, monkeypatch, tmp_path, caplog):
    (tmp_path / "token").write_text("stale")
    with pytest.warns(UserWarning, match="could not be sent to .*403"):
        train()
    assert server == []
    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL")
    train()
    assert server == []


@pytest.mark.parametrize(
    ("name", "model"), [("runtime", "TrainerV1alpha1ClusterTrainingRuntime"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_the_files_are_what_kubeflow_takes(name, model):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    given = yaml.safe_load((Path(__file__).parents[3] / "configs" / "clusters" / f"{name}.yml").read_text())
    assert getattr(models, model).from_dict(given).to_dict() == given  # It drops what it does not know.
