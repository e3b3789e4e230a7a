// API page, rendered from the server's OpenAPI description: routes, parameters, responses and curl examples.

import { request } from "./api.js";
import { byId, create } from "./dom.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const TYPE_NAMES = { string: "text", number: "number", integer: "integer", boolean: "true | false", null: "null" };
const MAX_DEPTH = 6;
// A photo is too long for a command-line argument, so the JSON is read from standard input.
const INFERENCE = `<<END
{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["$(base64 < photo.jpg | tr -d '\\n')"]}]}
END`;

let description = {};

// Resolve a $ref.
function resolve(schema) {
  if (!schema?.$ref) return schema ?? {};
  const keys = schema.$ref.split("/").slice(1).map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"));
  return keys.reduce((node, key) => node?.[key], description) ?? {};
}

// Format a schema as pseudo-JSON: keys with the types of their values.
function formatSchema(reference, depth = 0) {
  const schema = resolve(reference);
  if (depth > MAX_DEPTH) return "…";
  const either = schema.anyOf ?? schema.oneOf;
  if (either) return either.map((each) => formatSchema(each, depth)).join(" | ");
  if (schema.allOf?.length === 1) return formatSchema(schema.allOf[0], depth);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.prefixItems) return `[${schema.prefixItems.map((each) => formatSchema(each, depth)).join(", ")}]`;
  if (schema.type === "array") return `[${formatSchema(schema.items, depth)}, …]`;
  if (schema.properties) return formatObject(schema, depth);
  if (schema.type === "object") return "{…}";
  if (Array.isArray(schema.type)) return schema.type.map((type) => TYPE_NAMES[type] ?? type).join(" | ");
  if (schema.format === "binary") return "bytes";
  return TYPE_NAMES[schema.type] ?? "any";
}

function formatObject(schema, depth) {
  const lines = Object.entries(schema.properties).map(([key, value]) => {
    const optional = schema.required?.includes(key) ? "" : "?";
    return `${"  ".repeat(depth + 1)}${key}${optional}: ${formatSchema(value, depth + 1)}`;
  });
  return `{\n${lines.join(",\n")}\n${"  ".repeat(depth)}}`;
}

function formatCurl(path, operation) {
  const url = path.replace(/^\//, "").replace(/\{(\w+)\}/g, (_, name) => name.toUpperCase());
  const parts = [`curl '${new URL(url, new URL("./", location.href)).href}'`];
  if (sessionStorage.length) parts.push('-H "Authorization: Bearer $VITKIT_TOKEN"'); // this server requires one
  const [kind] = Object.keys(resolve(operation.requestBody).content ?? {}); // the first is the default
  if (path.endsWith("/infer")) {
    parts.push(`-H 'Content-Type: application/json' -d @- ${INFERENCE}`);
  } else if (kind?.endsWith("json")) {
    parts.push("-H 'Content-Type: application/json' -d @request.json");
  } else if (kind) {
    parts.push("-H 'Content-Type: application/octet-stream' --data-binary @photo.jpg");
  }
  return parts.join(" \\\n  ");
}

function createTable(headers, rows) {
  const body = rows.map((row) => create("tr", {}, row.map((text) => create("td", {}, text))));
  return create("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": headers.join(", ") },
    create("table", {},
      create("thead", {}, create("tr", {}, headers.map((text) => create("th", { scope: "col" }, text)))),
      create("tbody", {}, body)));
}

function createParameters(operation) {
  const rows = (operation.parameters ?? []).map(resolve).map((parameter) => {
    const schema = resolve(parameter.schema);
    const defaultValue = schema.default === undefined ? "" : ` = ${JSON.stringify(schema.default)}`;
    const name = `${parameter.name}${parameter.required ? "" : "?"}`;
    return [name, parameter.in, formatSchema(schema) + defaultValue, parameter.description ?? schema.description ?? ""];
  });
  return rows.length ? [create("h3", {}, "Parameters"), createTable(["name", "in", "type", "description"], rows)] : [];
}

function createContents(content) {
  return Object.entries(content ?? {}).flatMap(([kind, { schema = {}, example }]) => {
    const text = example === undefined ? formatSchema(schema) : JSON.stringify(example, null, 2);
    return [create("p", {}, create("code", {}, kind)), text !== "any" && create("pre", { tabindex: "0" }, text)];
  });
}

function createResponses(operation) {
  const all = Object.entries(operation.responses ?? {}).map(([status, response]) => [status, resolve(response)]);
  const success = all.filter(([status]) => status.startsWith("2"));
  const errors = all.filter(([status]) => !status.startsWith("2"));
  return [
    ...success.flatMap(([status, { content }]) => [create("h3", {}, `Response ${status}`), ...createContents(content)]),
    errors.length && create("h3", {}, "Errors"),
    errors.length && createTable(["status", "when"], errors.map(([status, response]) => [status, response.description ?? ""])),
  ];
}

function createRoute(path, method, operation) {
  const body = resolve(operation.requestBody);
  const hasDescription = operation.description && operation.description !== operation.summary;
  return create("details", { class: "route" },
    create("summary", {},
      create("span", { class: `method ${method}` }, method.toUpperCase()),
      create("span", { class: "path" }, path),
      create("span", { class: "summary" }, operation.summary ?? "")),
    create("div", { class: "inside" },
      hasDescription && create("p", {}, operation.description),
      create("pre", { tabindex: "0", class: "curl" }, formatCurl(path, operation)),
      createParameters(operation),
      body.content && create("h3", {}, "Body"),
      body.description && create("p", {}, body.description),
      createContents(body.content),
      createResponses(operation)));
}

async function start() {
  try {
    description = await request("openapi.json");
  } catch (error) {
    byId("lead").textContent = `${error.message} ${error.hint ?? ""}`;
    return;
  }
  const { title = "vitkit", version = "", description: text = "" } = description.info ?? {};
  byId("title").textContent = `${title} API ${version}`;
  byId("lead").textContent = text || "All routes of this server.";
  byId("routes").replaceChildren(...Object.entries(description.paths ?? {}).flatMap(([path, operations]) =>
    METHODS.filter((method) => method in operations).map((method) => createRoute(path, method, operations[method]))));
}

start();
