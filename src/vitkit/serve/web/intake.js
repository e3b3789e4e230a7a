// Drops, pastes, choices and photos go in; files come out, one call for all that came together.

import { find, make } from "./elements.js";

export function startIntake(take, complain) {
  const given = (files) => { if (files.length) take([...files]); };

  for (const input of [find("files"), find("capture")]) {
    input.addEventListener("change", () => { given(input.files); input.value = ""; });
  }
  find("pick").addEventListener("click", () => find("files").click());
  find("photograph").addEventListener("click", () => photograph(given, complain));
  find("drop").addEventListener("click", (event) => {
    if (event.target === event.currentTarget || event.target.closest(".invite")) find("files").click();
  });

  document.addEventListener("paste", (event) => {
    if (event.target.closest?.("input:not([type=file]), textarea")) return;
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) { event.preventDefault(); given(files); }
  });

  startDropping(given, complain);
}

function startDropping(given, complain) {
  let inside = 0;
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const light = (on) => document.body.classList.toggle("dropping", on);
  window.addEventListener("dragenter", (event) => { if (carries(event)) { inside += 1; light(true); } });
  window.addEventListener("dragleave", (event) => {
    if (!carries(event)) return;
    inside = Math.max(inside - 1, 0);
    light(inside > 0);
  });
  window.addEventListener("dragover", (event) => { if (carries(event)) event.preventDefault(); });
  window.addEventListener("drop", (event) => {
    inside = 0;
    light(false);
    if (!carries(event)) return;
    event.preventDefault();
    const items = [...event.dataTransfer.items].filter((item) => item.kind === "file");
    const files = items.filter((item) => !item.webkitGetAsEntry?.()?.isDirectory);
    given(files.map((item) => item.getAsFile()).filter(Boolean));
    if (files.length < items.length) complain("A folder cannot be dropped here. Open it and drop the images in it.");
  });
}

// A phone's own camera is the best one there; elsewhere the browser shows one, if the page came over a safe way.
function photograph(given, complain) {
  if (matchMedia("(pointer: coarse)").matches) {
    find("capture").click();
  } else if (navigator.mediaDevices?.getUserMedia) {
    viewfinder(given, complain);
  } else {
    complain("Browsers lend a camera only to pages over https, or from this machine itself. Choose a file instead.");
  }
}

async function viewfinder(given, complain) {
  let stream;
  try {
    const wanted = { facingMode: "environment", width: { ideal: 1920 } };
    stream = await navigator.mediaDevices.getUserMedia({ video: wanted });
  } catch (error) {
    const closed = error.name === "NotAllowedError";
    complain(closed ? "The browser was not allowed to use the camera." : "No camera was found.");
    return;
  }
  const video = make("video", { autoplay: true, playsinline: true, muted: true, "aria-label": "What the camera sees" });
  video.srcObject = stream;
  const dialog = make("dialog", { id: "camera-dialog", "aria-label": "Take a photo" }, video,
    make("div", { class: "ways" },
      make("button", { type: "button", class: "main", on: { click: () => shoot(video, given, dialog) } },
        "Take the photo"),
      make("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel")));
  dialog.addEventListener("close", () => {
    for (const track of stream.getTracks()) track.stop();
    dialog.remove();
  });
  document.body.append(dialog);
  dialog.showModal();
}

function shoot(video, given, dialog) {
  if (!video.videoWidth) return; // the camera is still waking up
  const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
  canvas.getContext("2d").drawImage(video, 0, 0);
  const name = `photo ${new Date().toTimeString().slice(0, 8).replaceAll(":", "-")}.jpg`;
  canvas.toBlob((blob) => {
    given([new File([blob], name, { type: blob.type })]);
    dialog.close();
  }, "image/jpeg", 0.95);
}
