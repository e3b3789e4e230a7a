// Access token, kept in the session storage of this tab only.

import { create } from "./dom.js";

const KEY = "vitkit-token";
let pending = null;

export const token = () => sessionStorage.getItem(KEY);

// Several requests may need a token at once: they share one dialog.
export function promptToken(rejected) {
  pending ??= openDialog(rejected).finally(() => { pending = null; });
  return pending;
}

function openDialog(rejected) {
  return new Promise((resolve) => {
    const field = create("input", {
      id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false",
      "aria-describedby": "token-help",
    });
    const dialog = create("dialog", { id: "token-dialog", "aria-labelledby": "token-title" },
      create("form", { method: "dialog" },
        create("h2", { id: "token-title" }, "This server requires a token"),
        create("p", { id: "token-help", role: rejected ? "alert" : null }, rejected
          ? "The token was not accepted. Ask the server's operator for the right one."
          : "It was set with VITKIT_TOKEN or --token-file when the server was started."),
        create("label", { class: "field", for: "token" }, "Token ", field),
        create("div", { class: "buttons" },
          create("button", { type: "submit", value: "use", class: "main" }, "Continue"),
          create("button", { type: "button", on: { click: () => dialog.close("") } }, "Cancel"))));
    dialog.addEventListener("close", () => {
      const value = dialog.returnValue === "use" ? field.value.trim() : "";
      if (value) sessionStorage.setItem(KEY, value);
      dialog.remove();
      resolve(value || null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
