// The page: an address goes in, one of its views comes out.

import { find } from "./elements.js";
import { startImages } from "./images.js";
import { showTraining } from "./training.js";

function turn() {
  if (!["", "#images", "#training"].includes(location.hash)) return;
  const training = location.hash === "#training";
  find("images-view").hidden = training;
  find("training-view").hidden = !training;
  find("to-images").toggleAttribute("aria-current", false);
  find("to-training").toggleAttribute("aria-current", false);
  find(training ? "to-training" : "to-images").setAttribute("aria-current", "page");
  document.title = training ? "vitkit: training" : "vitkit: images";
  showTraining(training);
}

window.addEventListener("hashchange", turn);
turn();
startImages();
