// The controls go in; what every picture shows comes out: rollout, a layer and a head, or the bare picture.

import { find } from "./elements.js";

export const view = { mode: "rollout", layer: 1, head: 0, strength: 0.85 };

const listeners = new Set();
export const onView = (listener) => listeners.add(listener);

const SAID = {
  rollout: "How much of each patch reaches the answer, through all layers. Choose Layers to go patch by patch.",
  layers: "What the answer's token looks at. Point at a patch, or use the arrow keys, to see what that patch looks at.",
  picture: "The picture alone.",
};

function tell() {
  const { mode, layer, head, strength } = view;
  const last = Number(find("layer").max);
  const heads = Number(find("head").max);
  find("layer-said").textContent = `${layer} of ${last}`;
  find("head-said").textContent = head === 0 ? "all, their mean" : `${head} of ${heads}`;
  find("layer").setAttribute("aria-valuetext", `layer ${layer} of ${last}`);
  find("head").setAttribute("aria-valuetext", head === 0 ? "the mean of all heads" : `head ${head} of ${heads}`);
  find("opacity-said").textContent = `${Math.round(100 * strength)} %`;
  find("mode-said").textContent = SAID[mode];
  find("controls").dataset.mode = mode;
  for (const listener of listeners) listener();
}

function choose(mode) {
  view.mode = mode;
  document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
}

export function startView() {
  for (const radio of document.querySelectorAll('input[name="mode"]')) {
    radio.addEventListener("change", () => { view.mode = radio.value; tell(); });
  }
  // Whoever moves a slider wants to see what it does.
  for (const slider of ["layer", "head"]) {
    find(slider).addEventListener("input", (event) => {
      view[slider] = Number(event.target.value);
      choose("layers");
      tell();
    });
  }
  find("opacity").addEventListener("input", (event) => {
    view.strength = Number(event.target.value) / 100;
    tell();
  });
}

// Fit the sliders to the models: the last layer is the first to look at.
export function fitView(models) {
  const looking = models.filter((model) => model.attention);
  find("controls").hidden = looking.length === 0;
  if (!looking.length) return;
  const layers = Math.max(...looking.map((model) => model.layers));
  const before = Number(find("layer").max);
  if (view.layer === before || view.layer > layers) view.layer = layers;
  find("layer").max = layers;
  find("layer").value = view.layer;
  const heads = Math.max(...looking.map((model) => model.heads));
  view.head = Math.min(view.head, heads);
  find("head").max = heads;
  find("head").value = view.head;
  tell();
}
