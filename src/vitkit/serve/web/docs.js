// The server's OpenAPI description goes in; a page to read comes out: routes, parameters, answers, and curl for each.

import { find, make } from "./elements.js";
import { ask } from "./server.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const KINDS = { string: "text", number: "number", integer: "integer", boolean: "true | false", null: "null" };
const DEEPEST = 6;
// A whole photo is too long for an argument, so the JSON goes in by the standard input.
const INFERENCE = `<<END
{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["$(base64 < photo.jpg | tr -d '\\n')"]}]}
END`;

let description = {};

// What a reference of the description points at.
function resolved(schema) {
  if (!schema?.$ref) return schema ?? {};
  const keys = schema.$ref.split("/").slice(1).map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"));
  return keys.reduce((place, key) => place?.[key], description) ?? {};
}

// The shape of a value in the way it is written: keys with the kinds of their values.
function shape(given, depth = 0) {
  const schema = resolved(given);
  if (depth > DEEPEST) return "…";
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return either.map((each) => shape(each, depth)).join(" | ");
  if (schema.allOf?.length === 1) return shape(schema.allOf[0], depth);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.prefixItems) return `[${schema.prefixItems.map((each) => shape(each, depth)).join(", ")}]`;
  if (schema.type === "array") return `[${shape(schema.items, depth)}, …]`;
  if (schema.properties) return object(schema, depth);
  if (schema.type === "object") return "{…}";
  if (Array.isArray(schema.type)) return schema.type.map((type) => KINDS[type] ?? type).join(" | ");
  if (schema.format === "binary") return "bytes";
  return KINDS[schema.type] ?? "anything";
}

function object(schema, depth) {
  const lines = Object.entries(schema.properties).map(([key, value]) => {
    const optional = schema.required?.includes(key) ? "" : "?";
    return `${"  ".repeat(depth + 1)}${key}${optional}: ${shape(value, depth + 1)}`;
  });
  return `{\n${lines.join(",\n")}\n${"  ".repeat(depth)}}`;
}

function curl(path, operation) {
  const place = path.replace(/^\//, "").replace(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const parts = [`curl '${new URL(place, new URL("./", location.href)).href}'`];
  if (sessionStorage.length) parts.push('-H "Authorization: Bearer $VITKIT_TOKEN"'); // this server asked for one
  const [kind] = Object.keys(resolved(operation.requestBody).content ?? {}); // the first is the usual one
  if (path.endsWith("/infer")) {
    parts.push(`-H 'Content-Type: application/json' -d @- ${INFERENCE}`);
  } else if (kind?.endsWith("json")) {
    parts.push("-H 'Content-Type: application/json' -d @request.json");
  } else if (kind) {
    parts.push("-H 'Content-Type: application/octet-stream' --data-binary @photo.jpg");
  }
  return parts.join(" \\\n  ");
}

function table(heads, rows) {
  const body = rows.map((row) => make("tr", {}, row.map((text) => make("td", {}, text))));
  return make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": heads.join(", ") },
    make("table", {},
      make("thead", {}, make("tr", {}, heads.map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, body)));
}

function parameters(operation) {
  const rows = (operation.parameters ?? []).map(resolved).map((parameter) => {
    const schema = resolved(parameter.schema);
    const usual = schema.default === undefined ? "" : ` = ${JSON.stringify(schema.default)}`;
    const name = `${parameter.name}${parameter.required ? "" : "?"}`;
    return [name, parameter.in, shape(schema) + usual, parameter.description ?? schema.description ?? ""];
  });
  return rows.length ? [make("h3", {}, "Parameters"), table(["name", "where", "kind", "meaning"], rows)] : [];
}

function contents(given) {
  return Object.entries(given ?? {}).flatMap(([kind, { schema = {}, example }]) => {
    const told = example === undefined ? shape(schema) : JSON.stringify(example, null, 2);
    return [make("p", {}, make("code", {}, kind)), told !== "anything" && make("pre", { tabindex: "0" }, told)];
  });
}

function answers(operation) {
  const found = Object.entries(operation.responses ?? {}).map(([status, given]) => [status, resolved(given)]);
  const good = found.filter(([status]) => status.startsWith("2"));
  const bad = found.filter(([status]) => !status.startsWith("2"));
  return [
    ...good.flatMap(([status, { content }]) => [make("h3", {}, `Answer ${status}`), ...contents(content)]),
    bad.length && make("h3", {}, "Refusals"),
    bad.length && table(["status", "when"], bad.map(([status, answer]) => [status, answer.description ?? ""])),
  ];
}

function route(path, method, operation) {
  const body = resolved(operation.requestBody);
  const told = operation.description && operation.description !== operation.summary;
  return make("details", { class: "route" },
    make("summary", {},
      make("span", { class: `method ${method}` }, method.toUpperCase()),
      make("span", { class: "path" }, path),
      make("span", { class: "summary" }, operation.summary ?? "")),
    make("div", { class: "inside" },
      told && make("p", {}, operation.description),
      make("pre", { tabindex: "0", class: "curl" }, curl(path, operation)),
      parameters(operation),
      body.content && make("h3", {}, "Body"),
      body.description && make("p", {}, body.description),
      contents(body.content),
      answers(operation)));
}

async function start() {
  try {
    description = await ask("openapi.json");
  } catch (error) {
    find("lead").textContent = `${error.message} ${error.hint ?? ""}`;
    return;
  }
  const { title = "vitkit", version = "", description: told = "" } = description.info ?? {};
  find("title").textContent = `${title} API ${version}`;
  find("lead").textContent = told || "Every address of this server.";
  find("routes").replaceChildren(...Object.entries(description.paths ?? {}).flatMap(([path, operations]) =>
    METHODS.filter((method) => method in operations).map((method) => route(path, method, operations[method]))));
}

start();
