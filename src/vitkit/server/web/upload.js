// Image input: file picker, drag and drop, clipboard and camera. Calls onFiles(files) or onError(text).

import { byId, create } from "./dom.js";

export function startUpload(onFiles, onError) {
  const submit = (files) => { if (files.length) onFiles([...files]); };

  for (const input of [byId("files"), byId("capture")]) {
    input.addEventListener("change", () => { submit(input.files); input.value = ""; });
  }
  byId("pick").addEventListener("click", () => byId("files").click());
  byId("photograph").addEventListener("click", () => takePhoto(submit, onError));
  byId("drop").addEventListener("click", (event) => {
    if (event.target === event.currentTarget || event.target.closest(".invite")) byId("files").click();
  });

  document.addEventListener("paste", (event) => {
    if (event.target.closest?.("input:not([type=file]), textarea")) return;
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) { event.preventDefault(); submit(files); }
  });

  startDragAndDrop(submit, onError);
}

function startDragAndDrop(submit, onError) {
  let depth = 0; // dragenter and dragleave also fire for child elements
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const setDropHighlight = (on) => document.body.classList.toggle("dropping", on);
  window.addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth += 1; setDropHighlight(true); } });
  window.addEventListener("dragleave", (event) => {
    if (!hasFiles(event)) return;
    depth = Math.max(depth - 1, 0);
    setDropHighlight(depth > 0);
  });
  window.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  window.addEventListener("drop", (event) => {
    depth = 0;
    setDropHighlight(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    const items = [...event.dataTransfer.items].filter((item) => item.kind === "file");
    const files = items.filter((item) => !item.webkitGetAsEntry?.()?.isDirectory);
    submit(files.map((item) => item.getAsFile()).filter(Boolean));
    if (files.length < items.length) onError("Folders cannot be dropped here. Open the folder and drop its images.");
  });
}

// Phones open their own camera app; other browsers offer a camera only in a secure context.
function takePhoto(submit, onError) {
  if (matchMedia("(pointer: coarse)").matches) {
    byId("capture").click();
  } else if (navigator.mediaDevices?.getUserMedia) {
    openCamera(submit, onError);
  } else {
    onError("Browsers allow camera access only over https or on localhost. Choose a file instead.");
  }
}

async function openCamera(submit, onError) {
  let stream;
  try {
    const constraints = { facingMode: "environment", width: { ideal: 1920 } };
    stream = await navigator.mediaDevices.getUserMedia({ video: constraints });
  } catch (error) {
    const denied = error.name === "NotAllowedError";
    onError(denied ? "Access to the camera was denied." : "No camera was found.");
    return;
  }
  const video = create("video", { autoplay: true, playsinline: true, muted: true, "aria-label": "Camera preview" });
  video.srcObject = stream;
  const dialog = create("dialog", { id: "camera-dialog", "aria-label": "Take a photo" }, video,
    create("div", { class: "buttons" },
      create("button", { type: "button", class: "main", on: { click: () => capture(video, submit, dialog) } },
        "Take photo"),
      create("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel")));
  dialog.addEventListener("close", () => {
    for (const track of stream.getTracks()) track.stop();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}

function capture(video, submit, dialog) {
  if (!video.videoWidth) return; // the stream has not started yet
  const canvas = create("canvas", { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  const name = `photo ${new Date().toTimeString().slice(0, 8).replaceAll(":", "-")}.jpg`;
  canvas.toBlob((blob) => {
    submit([new File([blob], name, { type: blob.type })]);
    dialog.close();
  }, "image/jpeg", 0.95);
}
