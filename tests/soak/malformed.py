"""Requests that no honest client sends: broken HTTP, and inconsistent bodies."""

import json
from collections.abc import Sequence

from server.serving import encode_image


def raw(path: str, body: bytes = b"", *, method: str = "POST", headers: Sequence[str] = ()) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def malformed_http() -> dict[str, bytes]:
    """Return malformed and unusual HTTP requests by name."""
    image = encode_image()
    get = raw("/v1/models", method="GET")
    inner = raw("/v1/models", method="GET", headers=["X-Inner: yes"])
    chunked = ["Transfer-Encoding: chunked"]
    paths = [
        "/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/models/%2e%2e/%2e%2e/",
        "/web/../../../etc/passwd",
        "/web/%2e%2e/%2e%2e/app.py",
        "/web/..%5c..%5capp.py",
        "/web//etc/passwd",
        "/web/%00",
        "/v1/models/%00",
        "/v1/models/%ff%fe",
        "/v1/models/%",
        "/v1/models/%zz",
        "/v1/runs/..%2f..",
        "/v2/models/%2e%2e/infer",
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/V1/MODELS",
        "/v1/models?" + "a=b&" * 5000,
        "/" + "a" * 60_000,
        "*",
        "http://evil.example/v1/models",
        "/v1/predict?model=../..",
        "/v1/predict?top=99999999999999999999",
        "/v1/predict?top=-1",
        "/v1/predict?top=1e9",
        "/v1/predict?top=%31",
        "/v1/attention?layer=999999&head=0",
        "/v1/attention?layer=0&head=-1",
        "/v1/predict?model=%F0%9F%90%88",
        "/v1/predict?top=1&top=2&model=a&model=b",
    ]
    requests = {
        f"path {path[:40]} by {method}": raw(path, image if method == "POST" else b"", method=method)
        for path in paths
        for method in ("GET", "POST")
    }
    methods = ("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PRI", "get", "G\x00T", "X" * 5000)
    requests |= {f"method {name[:10]!r}": raw("/v1/predict", image, method=name) for name in methods}
    lengths = ["-1", "+5", "0x10", "1e3", "5, 5", "99999999999999999999", "", " 5", "5;", "\u0665", "NaN"]
    requests |= {
        f"length {text!r}": raw("/v1/predict", b"hello", headers=[f"Content-Length: {text}".encode().decode("latin-1")])
        for text in lengths
    }
    bodies = {
        "chunk of a negative size": b"-1\r\nx\r\n0\r\n\r\n",
        "chunk of letters": b"zz\r\nx\r\n0\r\n\r\n",
        "chunk of exabytes": b"ffffffffffffffff\r\nx",
        "chunk beyond 64 bits": b"f" * 40 + b"\r\nx",
        "chunk with a long extension": b"1;" + b"a" * 100_000 + b"\r\nx\r\n0\r\n\r\n",
        "chunk without an end": b"5\r\nhel",
        "chunk longer than it says": b"1\r\nhello\r\n0\r\n\r\n",
        "trailers": b"0\r\nHost: evil\r\nContent-Length: 5\r\n\r\n",
        "trailers without an end": b"0\r\n" + b"A: b\r\n" * 20_000,
        "bare line feeds": b"1\nx\n0\n\n",
        "nothing": b"0\r\n\r\n",
    }
    requests |= {f"chunks: {name}": raw("/v1/predict", body, headers=chunked) for name, body in bodies.items()}
    smuggled = {
        "length and chunks": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=["Content-Length: 5", *chunked]),
        "chunks and length": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=[*chunked, "Content-Length: 5"]),
        "two lengths": raw("/v1/predict", b"x" * 5 + inner, headers=["Content-Length: 5", "Content-Length: 0"]),
        "unknown transfer encoding": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=["Transfer-Encoding: xchunked"]),
        "chunks twice": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=[*chunked, "Transfer-Encoding: identity"]),
        "chunks with a space": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=["Transfer-Encoding : chunked"]),
        "chunks with a tab": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=["Transfer-Encoding:\tchunked"]),
        "folded header": raw("/v1/predict", b"0\r\n\r\n" + inner, headers=["X: a", " Transfer-Encoding: chunked"]),
        "zero byte in a header": raw("/v1/predict", image, headers=["X-Evil: a\0b"]),
        "line feed in a header": raw("/v1/predict", image, headers=["X-Evil: a\nTransfer-Encoding: chunked"]),
    }
    requests |= {f"smuggled: {name}": content for name, content in smuggled.items()}
    requests |= {
        "header of 1 MB": raw("/v1/models", method="GET", headers=["X-Long: " + "a" * (1 << 20)]),
        "20,000 headers": raw("/v1/models", method="GET", headers=[f"X-{n}: a" for n in range(20_000)]),
        "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
        "two hosts": raw("/v1/models", method="GET", headers=["Host: evil.example"]),
        "another host": get.replace(b"Host: localhost", b"Host: evil.example"),
        "host with a path": get.replace(b"Host: localhost", b"Host: localhost/../evil"),
        "HTTP/0.9": b"GET /v1/models\r\n",
        "HTTP/1.0": b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n",
        "HTTP/9.9": b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0",
        "upgrade to h2c": raw(
            "/v1/models",
            method="GET",
            headers=["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"],
        ),
        "upgrade to a websocket": raw(
            "/v1/models",
            method="GET",
            headers=[
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Version: 13",
                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
            ],
        ),
        "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(200),
        "zeros": bytes(1000),
        "noise": bytes(range(256)) * 8,
        "pipelined": get * 50,
        "pipelined images": raw("/v1/predict", image) * 8,
        "expects 100-continue": raw("/v1/predict", image, headers=["Expect: 100-continue"]),
        "unknown expectation": raw("/v1/predict", image, headers=["Expect: 200-maybe"]),
        "gzip": raw("/v1/predict", image, headers=["Content-Encoding: gzip"]),
        "several encodings": raw("/v1/predict", image, headers=["Content-Encoding: identity, br"]),
        "form": raw("/v1/predict", image, headers=["Content-Type: multipart/form-data; boundary=x"]),
        "type of noise": raw("/v1/predict", image, headers=["Content-Type: \xff\xfe; charset=\x01"]),
        "range": raw("/", method="GET", headers=["Range: bytes=0-0," * 2000 + "1-1"]),
        "empty line first": b"\r\n" * 50_000 + get,
        "empty body": raw("/v1/predict"),
    }
    return requests


def inconsistent_requests() -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Return inconsistent JSON and KServe requests by name: path, body, headers."""
    infer, kind = "/v2/models/pets/infer", {"Content-Type": "application/json"}

    def infer_body(**changes: object) -> bytes:
        one: dict[str, object] = {"name": "image", "datatype": "BYTES", "shape": [1], "data": ["aGk="]}
        return json.dumps({"inputs": [one | changes]}).encode()

    def with_binary(head: bytes, tail: bytes, size: object) -> tuple[str, bytes, dict[str, str]]:
        return infer, head + tail, {"Inference-Header-Content-Length": str(size)}

    raw_head = infer_body(data=None, parameters={"binary_data_size": 8})
    huge = infer_body(name="pixels", datatype="FP32", shape=[2**21, 2**21, 2**21], data=[])
    wrapped = infer_body(name="pixels", datatype="FP32", shape=[2**31, 2**31, 4, 1], parameters={"binary_data_size": 0})
    return {
        "a list of 1,000,000": ("/v1/predict", b"[" + b'"",' * 999_999 + b'""]', kind),
        "a list of numbers": ("/v1/predict", b"[" + b"1," * 999_999 + b"1]", kind),
        "brackets": ("/v1/predict", b"[" * 1_000_000, kind),
        "objects in objects": ("/v1/predict", b'{"a":' * 500_000, kind),
        "an endless number": ("/v1/predict", b"[" + b"9" * 5_000_000 + b"]", kind),
        "no base64": ("/v1/predict", json.dumps(["!" * 1_000_000] * 8).encode(), kind),
        "base64 of nothing": ("/v1/predict", json.dumps(["A" * 10_000_000]).encode(), kind),
        "texts of surrogates": ("/v1/predict", b'["\\ud800\\udfff\\ud800"]', kind),
        "no UTF-8": ("/v1/predict", b'["\xff\xfe"]', kind),
        "NaN": ("/v1/predict", b"NaN", kind),
        "empty list": ("/v1/predict", b"[]", kind),
        "object": ("/v1/predict", b'{"a": 1}', kind),
        "inputs in brackets": (infer, b'{"inputs":' + b"[" * 500_000, kind),
        "shape of 2^63": (infer, huge, kind),
        "shape that wraps": with_binary(wrapped, b"", len(wrapped)),
        "shape of 10^4000": (
            infer,
            b'{"inputs":[{"name":"image","datatype":"BYTES","shape":[1' + b"0" * 4000 + b"]}]}",
            kind,
        ),
        "shape of nothing": (infer, infer_body(shape=[0]), kind),
        "shape below nothing": (infer, infer_body(shape=[-1]), kind),
        "shape of texts": (infer, infer_body(shape=["1"]), kind),
        "shape of true": (infer, infer_body(shape=[True]), kind),
        "pixels of texts": (
            infer,
            infer_body(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=["a"] * 3072),
            kind,
        ),
        "pixels in lists": (
            infer,
            infer_body(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[[[[1]]]] * 3072),
            kind,
        ),
        "pixels of 10^400": (
            infer,
            b'{"inputs":[{"name":"pixels","datatype":"FP32","shape":[1,3,32,32],"data":['
            + b",".join([b"1" + b"0" * 400] * 3072)
            + b"]}]}",
            kind,
        ),
        "NaN among pixels": (
            infer,
            infer_body(name="pixels", datatype="FP32", shape=[1, 3, 32, 32], data=[1.0] * 3072).replace(
                b"1.0,", b"NaN,"
            ),
            kind,
        ),
        "header longer than the body": with_binary(raw_head, b"", len(raw_head) + 1000),
        "header of a negative length": with_binary(raw_head, b"12345678", -5),
        "header of words": with_binary(raw_head, b"12345678", "many"),
        "header of 10^30": with_binary(raw_head, b"12345678", 10**30),
        "header of nothing": with_binary(raw_head, b"12345678", 0),
        "a file of 4 GB": with_binary(raw_head, b"\xff\xff\xff\xff1234", len(raw_head)),
        "bytes that belong to nobody": with_binary(infer_body(), b"12345678", len(infer_body())),
        "size of 2^63": with_binary(
            infer_body(data=None, parameters={"binary_data_size": 2**63}),
            b"12345678",
            len(infer_body(data=None, parameters={"binary_data_size": 2**63})),
        ),
        "outputs twice": (infer, json.dumps({"inputs": [], "outputs": [{"name": "logits"}] * 100_000}).encode(), kind),
        "an id of 5 MB": (infer, infer_body()[:-1] + b', "id": "' + b"x" * 5_000_000 + b'"}', kind),
    }
