// Entry point: switches between the image view and the training view by the URL fragment.

import { byId } from "./dom.js";
import { startImages } from "./images.js";
import { showTraining } from "./training.js";

function showView() {
  if (!["", "#images", "#training"].includes(location.hash)) return;
  const training = location.hash === "#training";
  byId("images-view").hidden = training;
  byId("training-view").hidden = !training;
  byId("to-images").toggleAttribute("aria-current", false);
  byId("to-training").toggleAttribute("aria-current", false);
  byId(training ? "to-training" : "to-images").setAttribute("aria-current", "page");
  document.title = training ? "vitkit: training" : "vitkit: images";
  showTraining(training);
}

window.addEventListener("hashchange", showView);
showView();
startImages();
