"""The end of a real server: asked to stop, it answers what it accepted; another takes over without a gap."""

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serve.serving import PATIENCE, Running, is_ready, metric, picture, served, started, tiny_model, until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("stopping") / "pets", depth=1)


def test_asked_to_stop_it_answers_what_it_accepted_and_refuses_new_connections(model: Path) -> None:
    with served(model, "limits.queue=16", "limits.deadline=60", patient=True) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        worker = server.worker()
        idle = socket.create_connection((host, int(port)), timeout=PATIENCE)
        os.kill(worker, signal.SIGSTOP)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(server.post, "/v1/predict", picture()) for _ in range(8)]
            until(lambda: metric(server, "vitkit_queue_images") == 8)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: is_refused(host, int(port)))
            os.kill(worker, signal.SIGCONT)
            assert [reply.result().status for reply in asked] == [200] * 8
        assert idle.recv(1) == b""
        idle.close()
        assert server.process.wait(PATIENCE) == 0
    assert not Path(f"/proc/{worker}").exists()


def is_refused(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return True
    return False


def test_ctrl_c_to_the_whole_group_is_a_clean_end(model: Path) -> None:
    with started(model, start_new_session=True) as server:
        until(lambda: is_ready(server))
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(PATIENCE) == 0


def test_without_its_front_the_worker_does_not_stay(model: Path) -> None:
    with served(model) as server:
        worker = server.worker()
        server.process.kill()
        until(lambda: not Path(f"/proc/{worker}").exists())


def test_two_servers_take_turns_on_one_socket_and_no_request_is_lost(model: Path) -> None:
    """A rolling restart: the second takes over while clients keep asking, each on a new connection."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.set_inheritable(True)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        options = {"pass_fds": [sock.fileno()]}

        def keep_asking() -> list[int]:
            asked = []
            while not stop.is_set():
                asked.append(Running(url, process=None).post("/v1/predict", picture()).status)  # type: ignore[arg-type]
            return asked

        with started(model, "--fd", sock.fileno(), **options) as first, ThreadPoolExecutor(2) as pool:
            assert first.url == url
            asking = [pool.submit(keep_asking) for _ in range(2)]
            with started(model, "--fd", sock.fileno(), **options) as second:
                assert second.url == url  # it says so once its models answer
                first.process.send_signal(signal.SIGTERM)
                assert first.process.wait(PATIENCE) == 0
                until(lambda: metric(second, "vitkit_images_total") > 5)
                stop.set()
                statuses = [status for one in asking for status in one.result()]
    assert set(statuses) == {200}
    assert len(statuses) > 10
