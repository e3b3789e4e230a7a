// A server that wants a token goes in, the token comes out; it is kept until the tab is closed, and nowhere else.

import { make } from "./elements.js";

const KEY = "vitkit-token";
let asking = null;

export const token = () => sessionStorage.getItem(KEY);

// Several requests may find out at once that a token is missing: they share one dialog.
export function askToken(refused) {
  asking ??= shown(refused).finally(() => { asking = null; });
  return asking;
}

function shown(refused) {
  return new Promise((resolve) => {
    const field = make("input", {
      id: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false",
      "aria-describedby": "token-said",
    });
    const dialog = make("dialog", { id: "token-dialog", "aria-labelledby": "token-title" },
      make("form", { method: "dialog" },
        make("h2", { id: "token-title" }, "This server asks for a token"),
        make("p", { id: "token-said", role: refused ? "alert" : null }, refused
          ? "That token was not accepted. Whoever started the server knows the right one."
          : "Whoever started the server has it: from VITKIT_TOKEN, or the file given to --token-file."),
        make("label", { class: "field", for: "token" }, "Token ", field),
        make("div", { class: "ways" },
          make("button", { type: "submit", value: "use", class: "main" }, "Use it"),
          make("button", { type: "button", on: { click: () => dialog.close("") } }, "Not now"))));
    dialog.addEventListener("close", () => {
      const given = dialog.returnValue === "use" ? field.value.trim() : "";
      if (given) sessionStorage.setItem(KEY, given);
      dialog.remove();
      resolve(given || null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
