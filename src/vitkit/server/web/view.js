// State of the attention controls: mode, layer, head and overlay strength, shared by all images.

import { byId } from "./dom.js";

export const view = { mode: "rollout", layer: 1, head: 0, strength: 0.85 };

const listeners = new Set();
export const onViewChange = (listener) => listeners.add(listener);

const MODE_HELP = {
  rollout: "Attention rollout: how much each patch contributes to the prediction, through all layers.",
  layers: "Attention of the class token. Point at a patch, or use the arrow keys, to see that patch's attention.",
  image: "The image without an overlay.",
};

function update() {
  const { mode, layer, head, strength } = view;
  const layers = Number(byId("layer").max);
  const heads = Number(byId("head").max);
  byId("layer-value").textContent = `${layer} of ${layers}`;
  byId("head-value").textContent = head === 0 ? "mean of all" : `${head} of ${heads}`;
  byId("layer").setAttribute("aria-valuetext", `layer ${layer} of ${layers}`);
  byId("head").setAttribute("aria-valuetext", head === 0 ? "mean of all heads" : `head ${head} of ${heads}`);
  byId("opacity-value").textContent = `${Math.round(100 * strength)} %`;
  byId("mode-help").textContent = MODE_HELP[mode];
  byId("controls").dataset.mode = mode;
  for (const listener of listeners) listener();
}

function setMode(mode) {
  view.mode = mode;
  document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
}

export function startView() {
  for (const radio of document.querySelectorAll('input[name="mode"]')) {
    radio.addEventListener("change", () => { view.mode = radio.value; update(); });
  }
  // Moving a slider switches to the mode that it affects.
  for (const slider of ["layer", "head"]) {
    byId(slider).addEventListener("input", (event) => {
      view[slider] = Number(event.target.value);
      setMode("layers");
      update();
    });
  }
  byId("opacity").addEventListener("input", (event) => {
    view.strength = Number(event.target.value) / 100;
    update();
  });
}

// Set the slider ranges to those of the selected models, starting at the last layer.
export function setModels(models) {
  const withAttention = models.filter((model) => model.attention);
  byId("controls").hidden = withAttention.length === 0;
  if (!withAttention.length) return;
  const layers = Math.max(...withAttention.map((model) => model.layers));
  const previous = Number(byId("layer").max);
  if (view.layer === previous || view.layer > layers) view.layer = layers;
  byId("layer").max = layers;
  byId("layer").value = view.layer;
  const heads = Math.max(...withAttention.map((model) => model.heads));
  view.head = Math.min(view.head, heads);
  byId("head").max = heads;
  byId("head").value = view.head;
  update();
}
